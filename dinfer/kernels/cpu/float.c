/* Linear maps in float32 for CPUs with AVX-512 whose BLAS leaves half of it unused: MKL takes AVX2 on AMD.

   A tile is 32 outputs and up to DEEP inputs, transposed to the first-level cache, and all rows pass over it, ROWS at a
   time. Sums of a row do not depend on its neighbours.

   Shapes: R rows, K inputs, O outputs. K is a multiple of 16. */

#ifdef __AVX512F__
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 8
#define LANES 16
#define WIDE 32 /* outputs of a tile: two vectors */
#define DEEP 256

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Eight rows of eight floats become eight columns: to[i][0..7] of rows[0..7][i]. */
static inline void transpose(const float *const *rows, int64_t k, float *to) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i] + k);
    for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * WIDE, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * WIDE, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

/* ROWS rows times a tile over n inputs: x[n][ROWS], w[n][WIDE], added to out[ROWS][O] unless it is the `first`. */
static inline void multiply(const float *x, const float *w, int64_t n, float *out, int64_t O, int64_t rows, int64_t lanes,
                            int first) {
    __m512 low[ROWS], high[ROWS];
    __mmask16 left = lanes >= LANES ? 0xFFFF : (__mmask16)((1 << lanes) - 1);
    __mmask16 right = lanes >= WIDE ? 0xFFFF : lanes > LANES ? (__mmask16)((1 << (lanes - LANES)) - 1) : 0;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; k++, x += ROWS, w += WIDE) {
        __m512 a = _mm512_loadu_ps(w), b = _mm512_loadu_ps(w + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __m512 each = _mm512_set1_ps(x[r]);
            low[r] = _mm512_fmadd_ps(a, each, low[r]), high[r] = _mm512_fmadd_ps(b, each, high[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        float *to = out + r * O;
        if (!first) {
            low[r] = _mm512_add_ps(low[r], _mm512_maskz_loadu_ps(left, to));
            high[r] = _mm512_add_ps(high[r], _mm512_maskz_loadu_ps(right, to + LANES));
        }
        _mm512_mask_storeu_ps(to, left, low[r]);
        _mm512_mask_storeu_ps(to + LANES, right, high[r]);
    }
}

/* out[R, O] = x[R, K] times the transpose of w[O, K]. Returns 0, or 1 without memory. */
int dinfer_float_linear(const float *x, int64_t R, int64_t K, const float *w, float *out, int64_t O, int64_t threads) {
    int64_t blocks = (R + ROWS - 1) / ROWS;
    float *side = aligned_alloc(64, blocks * ROWS * K * sizeof(float)); /* ROWS rows side by side, zeros behind the last */
    static const float nothing[DEEP];
    if (!side) return 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t k = 0; k < K; k++)
                for (int64_t r = 0; r < ROWS; r++)
                    side[(b * K + k) * ROWS + r] = b * ROWS + r < R ? x[(b * ROWS + r) * K + k] : 0;
        float tile[DEEP * WIDE] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic)
        for (int64_t o = 0; o < O; o += WIDE)
            for (int64_t k = 0; k < K; k += DEEP) {
                int64_t n = least(DEEP, K - k);
                for (int64_t part = 0; part < WIDE; part += 8) {
                    const float *rows[8];
                    for (int64_t i = 0; i < 8; i++) rows[i] = o + part + i < O ? w + (o + part + i) * K + k : nothing;
                    for (int64_t i = 0; i < n; i += 8) transpose(rows, i, tile + i * WIDE + part);
                }
                for (int64_t b = 0; b < blocks; b++)
                    multiply(side + (b * K + k) * ROWS, tile, n, out + b * ROWS * O + o, O, least(ROWS, R - b * ROWS), O - o, !k);
            }
    }
    free(side);
    return 0;
}
#endif
