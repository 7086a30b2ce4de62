/* Linear maps with weights in few bits, on x86 CPUs with AVX2, and with AVX-512 and VNNI if the compiler finds them.

   Products are of integers. With weights in 8 bits, each row of the inputs is rounded to 16 bits, which is more than
   bfloat16 has. With weights in fewer bits, each group of 16 or 32 inputs is rounded to 8 bits, at its own scale.

   A tile is LANES outputs. Its weights are decoded to the first-level cache, where each 32-bit lane of a vector belongs to
   one output, and all rows pass over it. So each weight is read from memory and decoded once, and no sum crosses lanes.

   Rows may belong to several weights (experts): those of one weight, a segment, are neighbours.

   Shapes: R rows, K inputs, O outputs, G groups. K is a multiple of 32, and of 256 for kinds with such blocks. */

#include <float.h>
#include <math.h>

#include "blocks.h"

#ifdef __AVX512BW__
typedef __m512i Ints;
#define ROWS 8 /* of a tile of registers */
#define LOAD(p) _mm512_loadu_si512(p)
#define ZERO _mm512_setzero_si512()
#define EACH(v) _mm512_set1_epi32(v)
#define ADD_32 _mm512_add_epi32
#define ADD_16 _mm512_add_epi16
#define MADD_16 _mm512_madd_epi16
#define PAIRS_8 _mm512_maddubs_epi16
#ifdef __AVX512VNNI__
#define DOT_16 _mm512_dpwssd_epi32
#define DOT_8 _mm512_dpbusd_epi32
#endif
#else
typedef __m256i Ints;
#define ROWS 4
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define ZERO _mm256_setzero_si256()
#define EACH(v) _mm256_set1_epi32(v)
#define ADD_32 _mm256_add_epi32
#define ADD_16 _mm256_add_epi16
#define MADD_16 _mm256_madd_epi16
#define PAIRS_8 _mm256_maddubs_epi16
#ifdef __AVXVNNI__
#define DOT_16 _mm256_dpwssd_avx_epi32
#define DOT_8 _mm256_dpbusd_avx_epi32
#endif
#endif
#ifndef DOT_16
#define DOT_16(a, x, w) ADD_32(a, MADD_16(x, w))
#endif

#define DEEP 1024 /* inputs of a tile of weights in 8 bits; of one in 16 bits, half as many */
#define SMALLEST 1e-30f
#define AHEAD 4096 /* bytes that memory brings meanwhile */

/* Outputs of one kind, of one weight or of one for each segment. `dinfer.kernels.cpu.linear` fills it. */
typedef struct {
    int64_t kind, outputs, values, row_bytes, segment_bytes;
    int64_t scale, scale_type, by_output, by_group, by_segment, group; /* of INT8 and INT4: scales in elements */
} Part;

/* Inputs for the tiles: ROWS rows side by side. Their values for one lane of weights are neighbours. */
typedef struct {
    void *values;
    float *scale, *total; /* of each row, or of each group: `total` is the sum of its rounded values */
} Inputs;

/* The largest magnitude. Bits of a float without its sign are in the order of magnitudes, with infinity and NaN above. */
static float largest(const float *x, int64_t n) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits), bits &= INT32_MAX;
        found = bits > found ? bits : found;
    }
    float most;
    memcpy(&most, &found, sizeof most);
    return most;
}

/* The factor that makes values integers up to `top`; 0 for values that are too small, infinite or NaN. */
static float factor(float most, float top) { return most > SMALLEST && most <= FLT_MAX ? top / most : 0; }

/* The scale of these integers; NaN for infinite values and NaN, so that their results are NaN too. */
static float scale_for(float most, float top) { return most <= FLT_MAX ? most / top : NAN; }

/* The rounded product; 0 without a factor. */
static int32_t rounded(float x, float by) { return by > 0 ? (int32_t)nearbyintf(x * by) : 0; }

/* Rounds `rows` rows to 16 bits, each at one scale, and fills the rest of ROWS with zeros. */
static void round_16(const float *x, int64_t rows, int64_t K, int16_t *to, float *scale) {
    for (int64_t r = 0; r < ROWS; r++, x += K) {
        float most = r < rows ? largest(x, K) : 0, by = factor(most, INT16_MAX);
        scale[r] = scale_for(most, INT16_MAX);
        for (int64_t k = 0; k < K; k += 2)
            for (int64_t i = 0; i < 2; i++) to[(k * ROWS) + 2 * r + i] = r < rows ? (int16_t)rounded(x[k + i], by) : 0;
    }
}

/* Rounds rows to 8 bits, each group at one scale. */
static void round_8(const float *x, int64_t rows, int64_t K, int64_t group, int8_t *to, float *scale, float *total) {
    for (int64_t r = 0; r < ROWS; r++, x += K)
        for (int64_t g = 0; g < K / group; g++) {
            const float *from = x + g * group;
            float most = r < rows ? largest(from, group) : 0, by = factor(most, INT8_MAX), s = scale_for(most, INT8_MAX);
            int8_t whole[32];
            int32_t sum = 0;
            for (int64_t i = 0; i < group; i++) sum += whole[i] = r < rows ? (int8_t)rounded(from[i], by) : 0;
            for (int64_t i = 0; i < group; i += 4) memcpy(to + (g * group + i) * ROWS + 4 * r, whole + i, 4);
            scale[g * ROWS + r] = s, total[g * ROWS + r] = s * sum;
        }
}

/* Adds the sums of a tile to the outputs, or writes them if they are the `first`. */
INLINE void add_to(float *out, int64_t O, int64_t rows, int64_t lanes, int first, const Floats *sum) {
    for (int64_t r = 0; r < rows; r++, out += O) {
        if (lanes == LANES) {
            STORE_FLOATS(out, first ? sum[r] : ADD_FLOATS(LOAD_FLOATS(out), sum[r]));
            continue;
        }
        float some[LANES];
        STORE_FLOATS(some, sum[r]);
        for (int64_t o = 0; o < lanes; o++) out[o] = first ? some[o] : out[o] + some[o];
    }
}

/* ROWS rows times a tile of weights in 8 bits over n inputs: x[n / 2][ROWS] and w[n / 2][LANES] are pairs. */
INLINE void tile_16(const int32_t *x, const int16_t *w, const float *d, int64_t n, const float *scale, Floats *sum) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r] = FLOAT_ZERO;
    for (int64_t k = 0; k < n; k += 32, d += LANES) {
        Ints all[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) all[r] = ZERO;
#pragma GCC unroll 4 /* or GCC keeps all products before it adds them */
        for (int i = 0; i < 16; i++, x += ROWS, w += 2 * LANES) {
            Ints pair = LOAD(w);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) all[r] = DOT_16(all[r], EACH(x[r]), pair);
        }
        Floats by = LOAD_FLOATS(d);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sum[r] = MULTIPLY_ADD(TO_FLOATS(all[r]), by, sum[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r] = MULTIPLY(sum[r], EACH_FLOAT(scale[r]));
}

/* `rows` rows times a tile of weights in fewer bits: x[n / 4][ROWS] and w[n / 4][LANES] are four values each.
   `group`: inputs that share a scale. `run`: products of pairs whose sum fits 16 bits. `ahead`: where the next tile's weights
   lie, `step` bytes for each group, which memory brings meanwhile. */
INLINE void tile_8(const int32_t *x, const uint8_t *w, const float *d, const float *m, int64_t n, int group, int run,
                   int rows, const float *scale, const float *total, const uint8_t *ahead, int64_t step, Floats *sum) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = FLOAT_ZERO;
    for (int64_t k = 0; k < n; k += group, d += LANES, m += LANES, scale += ROWS, total += ROWS) {
        Ints all[ROWS];
        for (const uint8_t *end = ahead + step; ahead < end; ahead += 64) _mm_prefetch((const char *)ahead, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) all[r] = ZERO;
        for (int i = 0; i < group / 4; i += run) {
#ifdef DOT_8
#pragma GCC unroll 4
            for (int j = 0; j < run; j++, x += ROWS, w += 4 * LANES) {
                Ints four = LOAD(w);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) all[r] = DOT_8(all[r], four, EACH(x[r]));
            }
#else
            Ints some[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) some[r] = ZERO;
#pragma GCC unroll 4
            for (int j = 0; j < run; j++, x += ROWS, w += 4 * LANES) {
                Ints four = LOAD(w);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) some[r] = ADD_16(some[r], PAIRS_8(four, EACH(x[r])));
            }
            Ints one = EACH(0x00010001);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) all[r] = ADD_32(all[r], MADD_16(some[r], one));
#endif
        }
        Floats by = LOAD_FLOATS(d), base = LOAD_FLOATS(m);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r] = MULTIPLY_ADD(MULTIPLY(TO_FLOATS(all[r]), EACH_FLOAT(scale[r])), by, sum[r]);
            sum[r] = MULTIPLY_ADD(base, EACH_FLOAT(total[r]), sum[r]);
        }
    }
}

/* As `tile_8`; for few rows the loops over them are shorter. */
#define TILE_OF(name, group, run)                                                                                       \
    static void name(const int32_t *x, const uint8_t *w, const float *d, const float *m, int64_t n, int64_t rows,         \
                     const float *s, const float *t, const uint8_t *ahead, int64_t step, Floats *sum) {                 \
        if (rows == 1) tile_8(x, w, d, m, n, group, run, 1, s, t, ahead, step, sum);                                                 \
        else if (rows <= 3) tile_8(x, w, d, m, n, group, run, 3, s, t, ahead, step, sum);                                            \
        else if (rows <= ROWS - 3) tile_8(x, w, d, m, n, group, run, ROWS - 3, s, t, ahead, step, sum);                              \
        else if (rows < ROWS) tile_8(x, w, d, m, n, group, run, ROWS - 1, s, t, ahead, step, sum);                                   \
        else tile_8(x, w, d, m, n, group, run, ROWS, s, t, ahead, step, sum);                                                        \
    }
TILE_OF(tile_4_bits, 32, 8)
TILE_OF(tile_5_bits, 32, 4)
TILE_OF(tile_of_16, 16, 2)

static float scale_at(const Part *p, int64_t at) {
    const uint8_t *from = (const uint8_t *)p->scale;
    if (p->scale_type) return p->scale_type == 1 ? half_at(from + 2 * at) : bfloat_at(from + 2 * at);
    return ((const float *)from)[at];
}

/* Decodes n inputs of one output, from input k on. */
static void decode(const Part *p, int64_t segment, int64_t output, int64_t k, int64_t n, uint8_t *u, float *d, float *m) {
    const Kind *kind = KINDS + p->kind;
    const uint8_t *row = (const uint8_t *)p->values + segment * p->segment_bytes + output * p->row_bytes;
    if (p->kind >= FIRST_BLOCK) {
        int64_t groups = kind->values / kind->group;
        row += k / kind->values * kind->bytes;
        for (int64_t i = 0; i < n; i += kind->values, row += kind->bytes, d += groups * LANES, m += groups * LANES)
            kind->decode(row, u + i, d, m);
        return;
    }
    int64_t at = segment * p->by_segment + output * p->by_output;
    for (int64_t i = 0; i < n; i += 32) {
        int64_t g = (k + i) / p->group, inside = (k + i) % p->group, half = p->group / 2;
        float scale = scale_at(p, at + g * p->by_group);
        d[i / 32 * LANES] = scale, m[i / 32 * LANES] = -8 * scale;
        if (p->kind == INT8)
            memcpy(u + i, row + k + i, 32);
        else if (half == 16)
            nibbles(row + (k + i) / 2, u + i, 16);
        else
            for (int64_t j = 0; j < 32; j++) { /* a group's first half is in the low bits of its bytes */
                uint8_t both = row[g * half + inside % half + j];
                u[i + j] = inside < half ? both & 15 : both >> 4;
            }
    }
}

/* Four bytes of each of 8 outputs become one vector, eight times: rows[8][stride] at column k. */
static inline void transpose(const uint8_t *rows, int64_t stride, __m256i *to) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i *)(rows + i * stride));
    for (int i = 0; i < 8; i += 2)
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    for (int i = 0; i < 2; i++) {
        a[4 * i] = _mm256_unpacklo_epi64(b[4 * i], b[4 * i + 2]), a[4 * i + 1] = _mm256_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm256_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm256_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        to[i] = _mm256_permute2x128_si256(a[i], a[4 + i], 0x20);
        to[4 + i] = _mm256_permute2x128_si256(a[i], a[4 + i], 0x31);
    }
}

/* A tile of n inputs from rows[LANES][DEEP]: four values a lane, or pairs widened to 16 bits. */
static void arrange(const uint8_t *rows, int64_t n, int wide, uint8_t *tile) {
    const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
    const __m256i high = _mm256_add_epi8(low, _mm256_set1_epi16(0x0200));
    for (int64_t k = 0; k < n; k += 32)
        for (int64_t o = 0; o < LANES; o += 8) {
            __m256i four[8];
            transpose(rows + o * DEEP + k, DEEP, four);
            for (int64_t i = 0; i < 8; i++) {
                uint8_t *to = tile + (k / 4 + i) * LANES * (wide ? 8 : 4) + 4 * o;
                if (!wide) {
                    _mm256_storeu_si256((__m256i *)to, four[i]);
                    continue;
                }
                _mm256_storeu_si256((__m256i *)to, _mm256_srai_epi16(_mm256_shuffle_epi8(four[i], low), 8));
                _mm256_storeu_si256((__m256i *)(to + 4 * LANES), _mm256_srai_epi16(_mm256_shuffle_epi8(four[i], high), 8));
            }
        }
}

#ifdef __AVX512VNNI__
/* The half floats in the low or, `shift` by 16, high bits of 16 values. */
INLINE Floats halves(__m512i both, int shift) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, shift)));
}

/* A tile of a kind that lies in tiles: of each block of 16 outputs the scales, and then vectors of four bytes an output
   (`dinfer.formats.kernels.packed.in_tiles`). Nothing crosses lanes, and memory is read from front to back. */
static void decode_tile(const Part *p, int64_t segment, int64_t output, int64_t k, int64_t n, uint8_t *tile, float *d, float *m) {
    const int64_t bytes = LANES * KINDS[p->kind].bytes, kind = p->kind - FIRST_TILED + FIRST_BLOCK;
    const uint8_t *from = (const uint8_t *)p->values + segment * p->segment_bytes + output * p->row_bytes + k / 32 * bytes;
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    const Floats base = EACH_FLOAT(kind == Q4_0 ? -8 : -128);
    for (int64_t i = 0; i < n; i += 32, from += bytes, d += LANES, m += LANES, tile += 32 * LANES) {
        const uint8_t *values = from + (kind == Q4_1 ? 4 : 2) * LANES;
        if (kind == Q4_1) {
            __m512i both = LOAD(from);
            STORE_FLOATS(d, halves(both, 0)), STORE_FLOATS(m, halves(both, 16));
        } else {
            Floats scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
            STORE_FLOATS(d, scale), STORE_FLOATS(m, MULTIPLY(scale, base));
        }
        if (kind == Q8_0)
            for (int j = 0; j < 8; j++)
                _mm512_store_si512(tile + 4 * LANES * j, _mm512_xor_si512(LOAD(values + 4 * LANES * j), sign));
        else
            for (int j = 0; j < 4; j++) {
                __m512i some = LOAD(values + 4 * LANES * j);
                _mm512_store_si512(tile + 4 * LANES * j, _mm512_and_si512(some, low));
                _mm512_store_si512(tile + 4 * LANES * (4 + j), _mm512_and_si512(_mm512_srli_epi16(some, 4), low));
            }
    }
}

/* As `decode_tile` and then `tile_8`, for inputs of one block of rows: what is decoded does not leave the registers. */
INLINE void tile_at_once(const uint8_t *from, int kind, const int32_t *x, int64_t n, int rows, const float *scale,
                         const float *total, Floats *sum) {
    const int64_t bytes = LANES * (kind == Q8_0 ? 34 : kind == Q4_1 ? 20 : 18);
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = FLOAT_ZERO;
    for (int64_t k = 0; k < n; k += 32, from += bytes, x += 8 * ROWS, scale += ROWS, total += ROWS) {
        const uint8_t *values = from + (kind == Q4_1 ? 4 : 2) * LANES;
        Ints all[ROWS];
        for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)from + AHEAD + i, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) all[r] = ZERO;
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            __m512i some = LOAD(values + 4 * LANES * (kind == Q8_0 ? 2 * j : j)), a, b;
            if (kind == Q8_0) a = _mm512_xor_si512(some, sign), b = _mm512_xor_si512(LOAD(values + 4 * LANES * (2 * j + 1)), sign);
            else a = _mm512_and_si512(some, low), b = _mm512_and_si512(_mm512_srli_epi16(some, 4), low);
            const int32_t *one = x + (kind == Q8_0 ? 2 * j : j) * ROWS, *two = x + (kind == Q8_0 ? 2 * j + 1 : 4 + j) * ROWS;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) all[r] = DOT_8(DOT_8(all[r], a, EACH(one[r])), b, EACH(two[r]));
        }
        Floats by, base;
        if (kind == Q4_1) by = halves(LOAD(from), 0), base = halves(LOAD(from), 16);
        else by = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)), base = MULTIPLY(by, EACH_FLOAT(kind == Q4_0 ? -8 : -128));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r] = MULTIPLY_ADD(MULTIPLY(TO_FLOATS(all[r]), EACH_FLOAT(scale[r])), by, sum[r]);
            sum[r] = MULTIPLY_ADD(base, EACH_FLOAT(total[r]), sum[r]);
        }
    }
}

#define AT_ONCE(name, kind)                                                                                            \
    static void name(const uint8_t *from, const int32_t *x, int64_t n, int64_t rows, const float *s, const float *t, Floats *sum) { \
        if (rows == 1) tile_at_once(from, kind, x, n, 1, s, t, sum);                                                   \
        else if (rows == 2) tile_at_once(from, kind, x, n, 2, s, t, sum);                                              \
        else if (rows == 3) tile_at_once(from, kind, x, n, 3, s, t, sum);                                              \
        else if (rows == 4) tile_at_once(from, kind, x, n, 4, s, t, sum);                                              \
        else if (rows == 5) tile_at_once(from, kind, x, n, 5, s, t, sum);                                              \
        else if (rows == 6) tile_at_once(from, kind, x, n, 6, s, t, sum);                                              \
        else if (rows == 7) tile_at_once(from, kind, x, n, 7, s, t, sum);                                              \
        else tile_at_once(from, kind, x, n, 8, s, t, sum);                                                             \
    }
AT_ONCE(q8_0_at_once, Q8_0)
AT_ONCE(q4_0_at_once, Q4_0)
AT_ONCE(q4_1_at_once, Q4_1)
typedef void AtOnce(const uint8_t *, const int32_t *, int64_t, int64_t, const float *, const float *, Floats *);
static AtOnce *const TILED_AT_ONCE[] = {q8_0_at_once, q4_0_at_once, q4_1_at_once};
#else
#define decode_tile(...) (void)0
#endif

static int zero(const float *x, int64_t n) {
    int64_t i = 0;
    while (i < n && x[i] == 0) i++;
    return i == n;
}

typedef struct {
    int64_t row, rows; /* of the inputs: up to ROWS of one segment */
} Block;

/* Whether these are the kernels that read kinds in tiles. */
int dinfer_in_tiles(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

/* out[R, O] = x[R, K] times the transpose of the weight of each row's segment; segment s has rows first[s] to first[s + 1].
   `parts` make up the O outputs of a weight. Returns 0, or 1 without memory. */
int dinfer_linear(const float *x, int64_t R, int64_t K, const int64_t *first, int64_t segments, const Part *parts,
                  int64_t count, float *out, int64_t O, int64_t threads) {
    int64_t all[2] = {0, first[1]}; /* without rows of zeros at the end, which stand for nothing */
    for (; segments == 1 && all[1] && zero(x + (all[1] - 1) * K, K); all[1]--) memset(out + (all[1] - 1) * O, 0, O * sizeof *out);
    first = segments == 1 ? all : first;
    int64_t blocks = 0, tiles = 0, failed = 0, needed[3] = {0, 0, 0}; /* inputs in 16 bits, in 8 by 32, in 8 by 16 */
    Block *block = malloc((R / ROWS + segments + 1) * sizeof *block);
    int64_t *begin = malloc((segments + 1) * sizeof *begin); /* the first block of each segment */
    for (int64_t s = 0; block && begin && s < segments; s++) {
        begin[s] = blocks;
        for (int64_t r = first[s]; r < first[s + 1]; r += ROWS) block[blocks++] = (Block){r, least(ROWS, first[s + 1] - r)};
        begin[s + 1] = blocks;
    }
    for (int64_t p = 0; p < count; p++) {
        const Kind *kind = KINDS + parts[p].kind;
        needed[kind->bits == 8 ? 0 : kind->group == 32 ? 1 : 2] = 1, tiles += (parts[p].outputs + LANES - 1) / LANES;
    }
    Inputs inputs[3] = {{0}};
    for (int i = 0; i < 3; i++)
        if (needed[i]) {
            int64_t scales = blocks * ROWS * (i == 0 ? 1 : K / (i == 1 ? 32 : 16)) * sizeof(float);
            inputs[i].values = malloc(blocks * ROWS * K * (i == 0 ? 2 : 1)), inputs[i].scale = malloc(scales);
            inputs[i].total = i ? malloc(scales) : 0;
            failed |= !inputs[i].values || !inputs[i].scale || (i && !inputs[i].total);
        }
    failed |= !block || !begin;
    int64_t work = failed ? 0 : segments * tiles;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t b = 0; b < (failed ? 0 : blocks); b++)
            for (int i = 0; i < 3; i++) {
                const float *from = x + block[b].row * K;
                int64_t group = i == 1 ? 32 : 16, at = b * ROWS * (K / group);
                if (i == 0 && needed[i])
                    round_16(from, block[b].rows, K, (int16_t *)inputs[i].values + b * ROWS * K, inputs[i].scale + b * ROWS);
                else if (needed[i])
                    round_8(from, block[b].rows, K, group, (int8_t *)inputs[i].values + b * ROWS * K, inputs[i].scale + at,
                            inputs[i].total + at);
            }
        uint8_t *rows = aligned_alloc(64, LANES * DEEP), *tile = aligned_alloc(64, LANES * DEEP);
        float d[DEEP / 16 * LANES], m[DEEP / 16 * LANES];
        if (!rows || !tile) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < work; task++) {
            int64_t segment = task / tiles, t = task % tiles, to = 0, p = 0;
            if (!rows || !tile || begin[segment] == begin[segment + 1]) continue;
            for (int64_t here; t >= (here = (parts[p].outputs + LANES - 1) / LANES); p++) t -= here, to += parts[p].outputs;
            const Part *part = parts + p;
            const Kind *kind = KINDS + part->kind;
            int wide = kind->bits == 8, which = wide ? 0 : kind->group == 32 ? 1 : 2;
            int64_t o = t * LANES, lanes = least(LANES, part->outputs - o), deep = wide ? DEEP / 2 : DEEP;
            const Inputs *in = inputs + which;
            for (int64_t k = 0; k < K; k += deep) {
                int64_t n = least(deep, K - k), groups = K / kind->group;
                const uint8_t *ahead = (const uint8_t *)part->values + segment * part->segment_bytes
                    + (o + LANES) * part->row_bytes + k / kind->group * (LANES * part->row_bytes / groups);
#ifdef __AVX512VNNI__
                if (part->kind >= FIRST_TILED && begin[segment + 1] - begin[segment] == 1) {
                    const Block *own = block + begin[segment];
                    int64_t at = begin[segment] * ROWS * groups + k / 32 * ROWS;
                    const uint8_t *from = (const uint8_t *)part->values + segment * part->segment_bytes + o * part->row_bytes
                        + k / 32 * LANES * kind->bytes;
                    Floats sum[ROWS];
                    TILED_AT_ONCE[part->kind - FIRST_TILED](
                        from, (const int32_t *)((const uint8_t *)in->values + (begin[segment] * K + k) * ROWS), n, own->rows,
                        in->scale + at, in->total + at, sum);
                    add_to(out + own->row * O + to + o, O, own->rows, lanes, !k, sum);
                    continue;
                }
#endif
                if (part->kind >= FIRST_TILED)
                    decode_tile(part, segment, o, k, n, tile, d, m);
                else {
                    if (lanes < LANES) memset(rows, 0, LANES * DEEP), memset(d, 0, sizeof d), memset(m, 0, sizeof m);
                    for (int64_t lane = 0; lane < lanes; lane++)
                        decode(part, segment, o + lane, k, n, rows + lane * DEEP, d + lane, m + lane);
                    arrange(rows, n, wide, tile);
                }
                for (int64_t b = begin[segment]; b < begin[segment + 1]; b++) {
                    Floats sum[ROWS];
                    const uint8_t *from = (const uint8_t *)in->values + (b * K + k) * ROWS * (wide ? 2 : 1);
                    int64_t at = b * ROWS * groups + k / kind->group * ROWS;
                    const float *scale = in->scale + at, *total = in->total + at;
                    if (wide)
                        tile_16((const int32_t *)from, (const int16_t *)tile, d, n, in->scale + b * ROWS, sum);
                    else
                        (which == 2 ? tile_of_16 : kind->bits == 4 ? tile_4_bits : tile_5_bits)(
                            (const int32_t *)from, tile, d, m, n, block[b].rows, scale, total, ahead,
                            b == begin[segment] ? LANES * part->row_bytes / groups : 0, sum);
                    add_to(out + block[b].row * O + to + o, O, block[b].rows, lanes, !k, sum);
                }
            }
        }
        free(rows), free(tile);
    }
    for (int i = 0; i < 3; i++) free(inputs[i].values), free(inputs[i].scale), free(inputs[i].total);
    free(block), free(begin);
    return (int)failed;
}
