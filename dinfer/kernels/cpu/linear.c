/* Linear maps with weights in 8 and 4 bits on x86 CPUs with AVX2, and with AVX-512 and VNNI where the compiler finds them.

   Products are of integers. With weights in 8 bits, each row of the inputs is rounded to 13 bits: more than bfloat16 has.
   With weights in 4 bits, each group of inputs is rounded to 8 bits, at a scale of its own. A tile of weights stays in the
   first-level cache while all rows pass over it, so each weight is read from memory once.

   Shapes: R rows, K inputs, O outputs, G groups. K is a multiple of 64; a group is 32, 64 or 128 inputs. */

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512BW__
typedef __m512i Ints;
typedef __m512 Floats;
#define BYTES 64
#define LOAD(p) _mm512_loadu_si512(p)
#define ZERO _mm512_setzero_si512()
#define WIDEN(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define FLOAT_ZERO _mm512_setzero_ps()
#define ADD_FLOATS _mm512_add_ps
#define TO_FLOATS _mm512_cvtepi32_ps
#define SPREAD _mm512_set1_ps
#define MULTIPLY _mm512_mul_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define SUM_FLOATS _mm512_reduce_add_ps
#define FIRST(v) _mm512_zextsi128_si512(_mm_cvtsi32_si128(v))
#ifdef __AVX512VNNI__
#define DOT_16(a, x, w) _mm512_dpwssd_epi32(a, x, w)
#define DOT_8(a, w, x) _mm512_dpbusd_epi32(a, w, x)
#else
#define DOT_16(a, x, w) _mm512_add_epi32(a, _mm512_madd_epi16(x, w))
#define PAIRS(w, x) _mm512_maddubs_epi16(w, x)
#define ADD_16 _mm512_add_epi16
#define ADD_PAIRS(a, s) _mm512_add_epi32(a, _mm512_madd_epi16(s, _mm512_set1_epi16(1)))
#endif
#define TALL 4
static inline __m256i half(Ints v) { return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)); }
#else
typedef __m256i Ints;
typedef __m256 Floats;
#define BYTES 32
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define ZERO _mm256_setzero_si256()
#define WIDEN(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p)))
#define FLOAT_ZERO _mm256_setzero_ps()
#define ADD_FLOATS _mm256_add_ps
#define TO_FLOATS _mm256_cvtepi32_ps
#define SPREAD _mm256_set1_ps
#define MULTIPLY _mm256_mul_ps
#define MULTIPLY_ADD _mm256_fmadd_ps
#define FIRST(v) _mm256_zextsi128_si256(_mm_cvtsi32_si128(v))
#ifdef __AVXVNNI__
#define DOT_16(a, x, w) _mm256_dpwssd_avx_epi32(a, x, w)
#define DOT_8(a, w, x) _mm256_dpbusd_avx_epi32(a, w, x)
#else
#define DOT_16(a, x, w) _mm256_add_epi32(a, _mm256_madd_epi16(x, w))
#define PAIRS(w, x) _mm256_maddubs_epi16(w, x)
#define ADD_16 _mm256_add_epi16
#define ADD_PAIRS(a, s) _mm256_add_epi32(a, _mm256_madd_epi16(s, _mm256_set1_epi16(1)))
#endif
#define TALL 2
static inline __m256i half(Ints v) { return v; }
static inline float SUM_FLOATS(Floats v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
#endif

#define ROWS 4       /* rows of a tile of registers; TALL outputs */
#define LARGEST 4095 /* of the inputs: the sums over DEEP of them times 127 fit 32 bits */
#define SMALLEST 1e-30f
#define DEEP 2048    /* inputs of a tile of weights */
#define TILE 12      /* its outputs: 24 KB */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* What values are multiplied with to be integers up to `top`; 0 for those that are too small, or no numbers. */
static float factor(float most, float top) { return most > SMALLEST && most <= FLT_MAX ? top / most : 0; }

/* The scale of these integers. That of values which are no numbers is none either, and so is what they give. */
static float scale_for(float most, float top) { return most <= FLT_MAX ? most / top : NAN; }

/* A product that is no number gives 0. */
static int32_t rounded(float x, float by) { return by > 0 ? (int32_t)nearbyintf(x * by) : 0; }

static inline __m128i sums(Ints a, Ints b, Ints c, Ints d) {
    __m256i low = _mm256_hadd_epi32(half(a), half(b)), high = _mm256_hadd_epi32(half(c), half(d));
    __m256i all = _mm256_hadd_epi32(low, high);
    return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

/* ROWS rows times `tall` outputs over n inputs, added to what is in out. */
static inline __attribute__((always_inline)) void
int8_block(const int16_t *x, int64_t K, const int8_t *w, int64_t n, int tall, const float *sx, const float *sw,
           float *out, int64_t O, int64_t rows, int first) {
    Ints sum[TALL][ROWS];
#pragma GCC unroll 4
    for (int o = 0; o < tall; o++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sum[o][r] = ZERO;
    for (int64_t k = 0; k < n; k += BYTES / 2) {
        Ints wide[TALL];
#pragma GCC unroll 4
        for (int o = 0; o < tall; o++) wide[o] = WIDEN(w + o * K + k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            Ints row = LOAD(x + r * K + k);
#pragma GCC unroll 4
            for (int o = 0; o < tall; o++) sum[o][r] = DOT_16(sum[o][r], row, wide[o]);
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < tall; o++) {
        float found[ROWS];
        __m128 whole = _mm_cvtepi32_ps(sums(sum[o][0], sum[o][1], sum[o][2], sum[o][3]));
        _mm_storeu_ps(found, _mm_mul_ps(_mm_mul_ps(whole, _mm_loadu_ps(sx)), _mm_set1_ps(sw[o])));
        for (int64_t r = 0; r < rows; r++) out[r * O + o] = first ? found[r] : out[r * O + o] + found[r];
    }
}

/* out[R, O] = x[R, K] times the transpose of w[O, K], whose rows have the scales sw[O]. Returns 0, or 1 without memory. */
int dinfer_int8_linear(const float *x, int64_t R, int64_t K, const int8_t *w, const float *sw, int64_t O, float *out,
                       int64_t threads) {
    int64_t padded = (R + ROWS - 1) / ROWS * ROWS;
    int16_t *q = malloc(padded * K * sizeof(int16_t));
    float *sx = malloc(padded * sizeof(float));
    if (!q || !sx) return free(q), free(sx), 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t r = 0; r < padded; r++) {
            float most = r < R ? largest(x + r * K, K) : 0, by = factor(most, LARGEST);
            sx[r] = scale_for(most, LARGEST);
            if (r < R)
                for (int64_t k = 0; k < K; k++) q[r * K + k] = (int16_t)rounded(x[r * K + k], by);
            else
                memset(q + r * K, 0, K * sizeof(int16_t));
        }
#pragma omp for schedule(dynamic)
        for (int64_t tile = 0; tile < O; tile += TILE)
            for (int64_t k = 0; k < K; k += DEEP)
                for (int64_t r = 0; r < R; r += ROWS) {
                    int64_t end = least(tile + TILE, O), n = least(DEEP, K - k), rows = least(ROWS, R - r), o = tile;
                    for (; o + TALL <= end; o += TALL)
                        int8_block(q + r * K + k, K, w + o * K + k, n, TALL, sx + r, sw + o, out + r * O + o, O, rows, !k);
                    for (; o < end; o++)
                        int8_block(q + r * K + k, K, w + o * K + k, n, 1, sx + r, sw + o, out + r * O + o, O, rows, !k);
                }
    }
    free(q), free(sx);
    return 0;
}

/* Values 0 to 15 of n inputs, one a byte, in order. */
static void spread(const uint8_t *w, uint8_t *to, int64_t n, int64_t group) {
    for (int64_t g = 0; g < n; g += group)
        for (int64_t i = 0; i < group / 2; i++) {
            uint8_t both = w[g / 2 + i];
            to[g + i] = both & 15, to[g + group / 2 + i] = both >> 4;
        }
}

/* The scale of each lane of a vector that begins in group g: it may hold two groups. */
static inline Floats scale_of(const float *s, int64_t g, int64_t group) {
#ifdef __AVX512BW__
    if (group == 32) return _mm512_insertf32x8(SPREAD(s[g]), _mm256_set1_ps(s[g + 1]), 1);
#endif
    return SPREAD(s[g]);
}

/* What the offset of the weights, 8, takes off the sums of each lane. */
static inline Ints offset_of(const int32_t *c, int64_t g, int64_t group) {
#ifdef __AVX512BW__
    if (group == 32) return _mm512_inserti32x8(FIRST(c[g]), _mm256_zextsi128_si256(_mm_cvtsi32_si128(c[g + 1])), 1);
#endif
    return FIRST(c[g]);
}

static inline __attribute__((always_inline)) void
int4_block(const int8_t *x, int64_t K, const uint8_t *w, int64_t n, int64_t group, int tall, const float *sx,
           const int32_t *cx, int64_t G, const float *sw, float *out, int64_t O, int64_t rows, int first) {
    Floats sum[TALL][ROWS];
    int64_t step = group < BYTES ? BYTES : group;
#pragma GCC unroll 4
    for (int o = 0; o < tall; o++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sum[o][r] = FLOAT_ZERO;
    for (int64_t k = 0; k < n; k += step) {
        int64_t g = k / group;
        Floats by[TALL];
#pragma GCC unroll 4
        for (int o = 0; o < tall; o++) by[o] = scale_of(sw + o * (DEEP / 32), g, group);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            Floats own = scale_of(sx + r * G, g, group);
            Ints begin = offset_of(cx + r * G, g, group);
#pragma GCC unroll 4
            for (int o = 0; o < tall; o++) {
                const int8_t *from = x + r * K + k;
                const uint8_t *of = w + o * DEEP + k;
#ifdef DOT_8
                Ints all = begin;
#pragma GCC unroll 4
                for (int64_t i = 0; i < step; i += BYTES) all = DOT_8(all, LOAD(of + i), LOAD(from + i));
#else
                Ints pairs = PAIRS(LOAD(of), LOAD(from));
                for (int64_t i = BYTES; i < step; i += BYTES) pairs = ADD_16(pairs, PAIRS(LOAD(of + i), LOAD(from + i)));
                Ints all = ADD_PAIRS(begin, pairs);
#endif
                sum[o][r] = MULTIPLY_ADD(TO_FLOATS(all), MULTIPLY(own, by[o]), sum[o][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < tall; o++)
        for (int64_t r = 0; r < rows; r++) {
            float found = SUM_FLOATS(sum[o][r]);
            out[r * O + o] = first ? found : out[r * O + o] + found;
        }
}

/* As above, for w[O, K / 2], two values a byte as `dinfer.kernels.packed.pack` puts them, and scales[O, G]. */
int dinfer_int4_linear(const float *x, int64_t R, int64_t K, const uint8_t *w, const float *scale, int64_t by_output,
                       int64_t by_group, int64_t group, int64_t O, float *out, int64_t threads) {
    int64_t padded = (R + ROWS - 1) / ROWS * ROWS, G = K / group, failed = 0;
    int8_t *q = malloc(padded * K);
    float *sx = malloc(padded * G * sizeof(float));
    int32_t *cx = malloc(padded * G * sizeof(int32_t));
    if (!q || !sx || !cx) return free(q), free(sx), free(cx), 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t r = 0; r < padded; r++)
            for (int64_t g = 0; g < G; g++) {
                int64_t at = r * K + g * group;
                float most = r < R ? largest(x + at, group) : 0, by = factor(most, 127);
                int32_t total = 0;
                for (int64_t k = at; k < at + group; k++) total += q[k] = r < R ? (int8_t)rounded(x[k], by) : 0;
                sx[r * G + g] = scale_for(most, 127), cx[r * G + g] = -8 * total;
            }
        uint8_t *wide = aligned_alloc(64, TILE * DEEP);
        float sw[TILE * (DEEP / 32)];
        if (!wide) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t tile = 0; tile < O; tile += TILE)
            for (int64_t k = 0; wide && k < K; k += DEEP) {
                int64_t end = least(TILE, O - tile), n = least(DEEP, K - k);
                for (int64_t o = 0; o < end; o++) {
                    spread(w + ((tile + o) * K + k) / 2, wide + o * DEEP, n, group);
                    for (int64_t g = 0; g < n / group; g++)
                        sw[o * (DEEP / 32) + g] = scale[(tile + o) * by_output + (k / group + g) * by_group];
                }
                for (int64_t r = 0; r < R; r += ROWS) {
                    int64_t rows = least(ROWS, R - r), o = 0;
                    const float *own = sx + r * G + k / group;
                    const int32_t *off = cx + r * G + k / group;
                    float *to = out + r * O + tile;
                    for (; o + TALL <= end; o += TALL)
                        int4_block(q + r * K + k, K, wide + o * DEEP, n, group, TALL, own, off, G, sw + o * (DEEP / 32),
                                   to + o, O, rows, !k);
                    for (; o < end; o++)
                        int4_block(q + r * K + k, K, wide + o * DEEP, n, group, 1, own, off, G, sw + o * (DEEP / 32),
                                   to + o, O, rows, !k);
                }
            }
        free(wide);
    }
    free(q), free(sx), free(cx);
    return (int)failed;
}
