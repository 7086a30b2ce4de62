// Memory of a card at addresses that stay while the memory itself is given back: CUDA's virtual memory, by the driver.
// Torch's allocator calls this, also while Python's lock is held elsewhere, so it is in C.

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location location; void *meta; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;
typedef uint64_t Address;

enum { PINNED = 1, DEVICE = 1, READ_WRITE = 3, GRAIN = 1 << 21 };

static int (*reserve)(Address *, size_t, size_t, Address, uint64_t);
static int (*release)(Address, size_t);
static int (*create)(uint64_t *, size_t, const Properties *, uint64_t);
static int (*forget)(uint64_t);
static int (*map)(Address, size_t, size_t, uint64_t, uint64_t);
static int (*permit)(Address, size_t, const Access *, size_t);
static int (*unmap)(Address, size_t);
static int (*wait)(void);

static size_t whole(size_t size) { return (size + GRAIN - 1) / GRAIN * GRAIN; }

// Finds the driver's functions. 0: it has them.
int addresses_begin(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return -1;
    *(void **)&reserve = dlsym(driver, "cuMemAddressReserve");
    *(void **)&release = dlsym(driver, "cuMemAddressFree");
    *(void **)&create = dlsym(driver, "cuMemCreate");
    *(void **)&forget = dlsym(driver, "cuMemRelease");
    *(void **)&map = dlsym(driver, "cuMemMap");
    *(void **)&permit = dlsym(driver, "cuMemSetAccess");
    *(void **)&unmap = dlsym(driver, "cuMemUnmap");
    *(void **)&wait = dlsym(driver, "cuCtxSynchronize");
    return reserve && release && create && forget && map && permit && unmap && wait ? 0 : -1;
}

// Puts memory of a card at a reserved address. It goes back when it is unmapped. 0, or the driver's error.
int addresses_wake(Address at, size_t size, int device) {
    Properties what = {PINNED, 0, {DEVICE, device}, NULL, {0}};
    Access access = {{DEVICE, device}, READ_WRITE};
    uint64_t memory;
    int error = create(&memory, whole(size), &what, 0);
    if (error) return error;
    error = map(at, whole(size), 0, memory, 0);
    forget(memory);
    if (error) return error;
    error = permit(at, whole(size), &access, 1);
    if (error) unmap(at, whole(size));
    return error;
}

int addresses_sleep(Address at, size_t size) { return unmap(at, whole(size)); }

void *addresses_alloc(ssize_t size, int device, void *stream) {
    Address at = 0;
    if (reserve(&at, whole(size), 0, 0, 0)) return NULL;
    if (addresses_wake(at, size, device)) {
        release(at, whole(size));
        return NULL;
    }
    return (void *)at;
}

void addresses_free(void *at, ssize_t size, int device, void *stream) {
    wait();
    unmap((Address)at, whole(size));  // fails if it sleeps
    release((Address)at, whole(size));
}
