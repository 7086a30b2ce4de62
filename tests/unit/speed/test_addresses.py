"""`addresses.c` over a driver that stands for CUDA's: what it asks for, and what is left when memory is short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dinfer.speed.addresses import FLAGS, SOURCE

# As in CUDA's header. Memory is there while it is mapped or held; a page that is not mapped cannot be touched.
DRIVER = """
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location location; void *meta; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;
size_t taken = 0, reserved = 0, limit = 3 << 21, sizes[99], held[99];
uint64_t places[99], count = 0;
static int drop(uint64_t one) { if (!held[one] && !places[one]) taken -= sizes[one]; return 0; }
int cuMemAddressReserve(uint64_t *at, size_t size, size_t align, uint64_t where, uint64_t flags) {
    *at = (uint64_t)mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    reserved += size;
    return align || where || flags || size % (1 << 21);
}
int cuMemAddressFree(uint64_t at, size_t size) { reserved -= size; return munmap((void *)at, size); }
int cuMemCreate(uint64_t *memory, size_t size, const Properties *what, uint64_t flags) {
    if (what->type != 1 || what->handles || what->location.type != 1 || what->location.id != 7 || flags) return 1;
    if (taken + size > limit) return 2;
    taken += sizes[*memory = ++count] = size;
    return !(held[count] = 1);
}
int cuMemRelease(uint64_t memory) { held[memory] = 0; return drop(memory); }
int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t memory, uint64_t flags) {
    places[memory] = at;
    return size != sizes[memory] || offset || flags;
}
int cuMemSetAccess(uint64_t at, size_t size, const Access *who, size_t number) {
    if (who->location.type != 1 || who->location.id != 7 || who->flags != 3 || number != 1) return 1;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE);
}
int cuMemUnmap(uint64_t at, size_t size) {
    for (uint64_t one = 1; one <= count; one++) if (places[one] == at && sizes[one] == size) {
        places[one] = 0;
        mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        return drop(one);
    }
    return 1;
}
int cuCtxSynchronize(void) { return 0; }
"""
PROGRAM = """
import ctypes, json, sys
own, driver = ctypes.CDLL(sys.argv[1]), ctypes.CDLL("libcuda.so.1")
address, size, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
own.addresses_alloc.argtypes, own.addresses_alloc.restype = (ctypes.c_ssize_t, number, ctypes.c_void_p), address
own.addresses_free.argtypes = address, ctypes.c_ssize_t, number, ctypes.c_void_p
own.addresses_wake.argtypes, own.addresses_sleep.argtypes = (address, size, number), (address, size)
def told():
    return [size.in_dll(driver, name).value >> 21 for name in ("taken", "reserved")]
found = {"begin": own.addresses_begin()}
one, other = (own.addresses_alloc(wide, 7, None) for wide in (5, (1 << 21) + 1))
ctypes.memset(one, 1, 5)
found |= {"apart": one != other, "full": told(), "none": own.addresses_alloc(5, 7, None), "kept": told()}
found |= {"sleep": own.addresses_sleep(one, 5), "again": own.addresses_sleep(one, 5), "asleep": told()}
third = own.addresses_alloc(5, 7, None)
found |= {"short": own.addresses_wake(one, 5, 7), "stays": told()}
own.addresses_free(third, 5, 7, None)
found |= {"wake": own.addresses_wake(one, 5, 7), "awake": told()}
ctypes.memset(one, 2, 5)
own.addresses_sleep(one, 5)
own.addresses_free(one, 5, 7, None)
own.addresses_free(other, (1 << 21) + 1, 7, None)
print(json.dumps(found | {"end": told()}))
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_memory_goes_and_comes_back_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    for made, source, flags in (("libcuda.so.1", tmp_path / "driver.c", []), ("own.so", SOURCE, ["-ldl"])):
        subprocess.run(["cc", *FLAGS, "-o", str(tmp_path / made), str(source), *flags], check=True)
    ran = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, str(tmp_path / "own.so")], capture_output=True, text=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "begin": 0, "apart": True, "full": [3, 3], "none": 0, "kept": [3, 3], "sleep": 0, "again": 1, "asleep": [2, 3],
        "short": 2, "stays": [3, 4], "wake": 0, "awake": [3, 3], "end": [0, 0],
    }  # fmt: skip
