/* Float32 on a CPU: linear maps, and the rest of a block: attention, norms, rotation, activation.

   For each of the latter torch takes several passes over its tensors, and copies keys. Here each is one pass.

   A tile of a matrix is WIDE columns and up to DEEP rows, in the first-level cache. Rows of inputs pass over it, TALL at a
   time. Results of a row do not depend on its neighbours.

   Functions return 0, or 1 without memory.

   Shapes: R rows, K inputs, O outputs; B lanes, W queries, H query heads, G key heads, E head size, P pages of T keys. */

#include <math.h>

#include "vectors.h"

#ifdef __AVX512BW__
#define TALL 8
#else
#define TALL 6
#endif
#define WIDE (2 * LANES)
#define DEEP 256
#define PANEL 512 /* rows of inputs that stay in the second-level cache while tiles pass */

/* Eight rows of eight floats become eight columns: to[i * step + 0..7] of rows[0..7][k + i]. */
INLINE void transpose(const float *const *rows, int64_t k, float *to, int64_t step) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i] + k);
    for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * step, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * step, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

/* WIDE rows of n floats as a tile w[n][WIDE]. */
INLINE void arrange(const float *const *rows, int64_t n, float *tile) {
    for (int64_t part = 0; part < WIDE; part += 8)
        for (int64_t i = 0; i < n; i += 8) transpose(rows + part, i, tile + i * WIDE + part, WIDE);
}

/* TALL rows times WIDE columns over n inputs, of which `rows` times `lanes` products are stored.

   Input k of row r is x[r][at[k]], or x[r][k] without `at`; the matrix is w[n][WIDE]. The products are added to `out`, or
   written there if they are the `first`. */
INLINE void multiply(const float *const *x, const int64_t *at, const float *w, int64_t n, float *out, int64_t step,
                     int64_t rows, int64_t lanes, int first) {
    Floats low[TALL], high[TALL];
#pragma GCC unroll 8
    for (int r = 0; r < TALL; r++) low[r] = high[r] = FLOAT_ZERO;
    for (int64_t k = 0; k < n; k++, w += WIDE) {
        Floats a = LOAD_FLOATS(w), b = LOAD_FLOATS(w + LANES);
        int64_t i = at ? at[k] : k;
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++) {
            Floats each = EACH_FLOAT(x[r][i]);
            low[r] = MULTIPLY_ADD(a, each, low[r]), high[r] = MULTIPLY_ADD(b, each, high[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < TALL; r++) {
        if (r >= rows) break;
        float *to = out + r * step;
        if (lanes >= WIDE) {
            STORE_FLOATS(to, first ? low[r] : ADD_FLOATS(low[r], LOAD_FLOATS(to)));
            STORE_FLOATS(to + LANES, first ? high[r] : ADD_FLOATS(high[r], LOAD_FLOATS(to + LANES)));
            continue;
        }
        float some[WIDE];
        STORE_FLOATS(some, low[r]), STORE_FLOATS(some + LANES, high[r]);
        for (int64_t i = 0; i < lanes; i++) to[i] = first ? some[i] : to[i] + some[i];
    }
}

/* out[R, O] = x[R, K] times the transpose of w[O, K]; K is a multiple of 8. */
int dinfer_linear_float(const float *x, const float *w, float *out, int64_t R, int64_t K, int64_t O, int64_t threads) {
    static const float nothing[DEEP];
    int64_t panels = (R + PANEL - 1) / PANEL, tiles = (O + WIDE - 1) / WIDE;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < panels * tiles; task++) {
        float tile[DEEP * WIDE] __attribute__((aligned(64)));
        int64_t first = task / tiles * PANEL, end = least(R, first + PANEL), o = task % tiles * WIDE;
        for (int64_t k = 0; k < K; k += DEEP) {
            const float *rows[WIDE];
            int64_t n = least(DEEP, K - k);
            for (int64_t i = 0; i < WIDE; i++) rows[i] = o + i < O ? w + (o + i) * K + k : nothing;
            arrange(rows, n, tile);
            for (int64_t r = first; r < end; r += TALL) {
                const float *from[TALL];
                for (int64_t i = 0; i < TALL; i++) from[i] = x + least(r + i, end - 1) * K + k;
                multiply(from, 0, tile, n, out + r * O + o, O, end - r, O - o, !k);
            }
        }
    }
    return 0;
}

INLINE float total(Floats x) {
    float each[LANES], sum = 0;
    STORE_FLOATS(each, x);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; i++) sum += each[i];
    return sum;
}

#define SHORT 4 /* rows of a tile of low-rank parts: mostly few are open */

/* low[rows][S], at place s: w[K] times rows of x. */
INLINE void downward(const float *const *x, const uint16_t *w, int64_t K, float *low, int64_t S, int rows) {
    Floats sum[TALL];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = FLOAT_ZERO;
    for (int64_t k = 0; k < K; k += LANES) {
        Floats each = OF_BFLOATS(w + k);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] = MULTIPLY_ADD(each, LOAD_FLOATS(x[r] + k), sum[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) low[r * S] = total(sum[r]);
}

/* y[r] += rows of low[ranks] times w[ranks][piece], of 2 * LANES outputs, or of LANES without `both`. */
INLINE void upward(float *const *y, const float *low, int64_t S, const uint16_t *w, int64_t ranks, int64_t piece, int both,
                   int rows, int64_t stored) {
    Floats sum[2 * TALL];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[2 * r] = sum[2 * r + 1] = FLOAT_ZERO;
    for (int64_t j = 0; j < ranks; j++) {
        Floats a = OF_BFLOATS(w + j * piece), b = both ? OF_BFLOATS(w + j * piece + LANES) : a;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            Floats each = EACH_FLOAT(low[r * S + j]);
            sum[2 * r] = MULTIPLY_ADD(a, each, sum[2 * r]);
            if (both) sum[2 * r + 1] = MULTIPLY_ADD(b, each, sum[2 * r + 1]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        if (r >= stored) break;
        STORE_FLOATS(y[r], ADD_FLOATS(LOAD_FLOATS(y[r]), sum[2 * r]));
        if (both) STORE_FLOATS(y[r] + LANES, ADD_FLOATS(LOAD_FLOATS(y[r] + LANES), sum[2 * r + 1]));
    }
}

/* y[R, O] += B A x of the rows of x[R, K] that are open. a[S, K] and b[P, ranks, piece] are bfloat16, O = P * piece;
   outputs of piece p take the `ranks` rows of a from first[p] on. K and piece are multiples of 16. */
int dinfer_low_rank(const float *x, const uint8_t *open, const uint16_t *a, const uint16_t *b, const int32_t *first, float *y,
                    int64_t R, int64_t K, int64_t S, int64_t P, int64_t ranks, int64_t piece, int64_t threads) {
    int64_t n = 0, *at = malloc((R + 1) * sizeof *at), parts = (piece + 2 * LANES - 1) / (2 * LANES);
    float *low = malloc((R + SHORT) * S * sizeof *low);
    if (!at || !low) return free(at), free(low), 1;
    for (int64_t r = 0; r < R; r++)
        if (open[r]) at[n++] = r;
#pragma omp parallel for num_threads(threads)
    for (int64_t s = 0; s < S; s++)
        for (int64_t g = 0; g < n; g += SHORT) {
            const float *from[SHORT];
            for (int r = 0; r < SHORT; r++) from[r] = x + at[least(g + r, n - 1)] * K;
            if (n - g < SHORT) downward(from, a + s * K, K, low + g * S + s, S, SHORT - 1);
            else downward(from, a + s * K, K, low + g * S + s, S, SHORT);
        }
#pragma omp parallel for num_threads(threads)
    for (int64_t task = 0; task < P * parts; task++) {
        int64_t p = task / parts, o = task % parts * 2 * LANES;
        const uint16_t *w = b + p * ranks * piece + o;
        for (int64_t j = 0; n && j < ranks; j++) _mm_prefetch((const char *)(w + (ranks + j) * piece), _MM_HINT_T0); /* the next */
        for (int64_t g = 0; g < n; g += SHORT) {
            float *to[SHORT];
            for (int r = 0; r < SHORT; r++) to[r] = y + (at[least(g + r, n - 1)] * P + p) * piece + o;
            if (o + LANES < piece && n - g < SHORT) upward(to, low + g * S + first[p], S, w, ranks, piece, 1, SHORT - 1, n - g);
            else if (o + LANES < piece) upward(to, low + g * S + first[p], S, w, ranks, piece, 1, SHORT, n - g);
            else upward(to, low + g * S + first[p], S, w, ranks, piece, 0, SHORT, n - g);
        }
    }
    return free(at), free(low), 0;
}

/* Scores[n][WIDE] of WIDE queries become their weights: those of keys [from, to), and 0 for others. */
INLINE void softmax(float *score, int64_t n, const int32_t *from, const int32_t *to, float scale) {
    float most[WIDE], sum[WIDE];
    for (int i = 0; i < WIDE; i++) most[i] = -INFINITY, sum[i] = 0;
    for (int32_t s = 0; s < n; s++) {
        const float *here = score + s * WIDE;
#pragma omp simd
        for (int i = 0; i < WIDE; i++) {
            float x = here[i], highest = most[i];
            most[i] = (s >= from[i]) & (s < to[i]) & (x > highest) ? x : highest;
        }
    }
    for (int32_t s = 0; s < n; s++) {
        float *here = score + s * WIDE;
#pragma omp simd
        for (int i = 0; i < WIDE; i++) {
            float weight = power((here[i] - most[i]) * scale);
            here[i] = (s >= from[i]) & (s < to[i]) ? weight : 0;
            sum[i] += here[i];
        }
    }
    for (int i = 0; i < WIDE; i++) sum[i] = 1 / sum[i];
    for (int64_t s = 0; s < n; s++)
        for (int i = 0; i < WIDE; i++) score[s * WIDE + i] *= sum[i];
}

/* Each query of q[B, W, H, E] attends to the keys [from, to) of its lane, in pages[B, P] of k and v[, T, G, E].

   WIDE queries, of all heads that share keys, are the columns of a tile, over which keys pass, and then the dimensions of the
   values. E is a multiple of WIDE, and at most DEEP. */
int dinfer_attention(const float *q, const float *k, const float *v, const int64_t *pages, const int64_t *from,
                     const int64_t *to, float *out, int64_t B, int64_t W, int64_t H, int64_t G, int64_t E, int64_t P, int64_t T,
                     int64_t threads) {
    static const float nothing[DEEP];
    int64_t shared = H / G, columns = W * shared, pieces = (columns + WIDE - 1) / WIDE;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *score = malloc(P * T * WIDE * sizeof *score), tile[DEEP * WIDE] __attribute__((aligned(64)));
        int64_t *at = malloc(P * T * sizeof *at);
        if (!score || !at) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < B * G * pieces; task++) {
            int64_t piece = task % pieces, g = task / pieces % G, b = task / pieces / G;
            int64_t queries = least(WIDE, columns - piece * WIDE), low = P * T, high = 0, row[WIDE], place[WIDE];
            int32_t first[WIDE], last[WIDE];
            const float *rows[WIDE];
            if (!score || !at) continue;
            for (int64_t i = 0; i < WIDE; i++) {
                int64_t column = piece * WIDE + least(i, queries - 1);
                row[i] = b * W + column / shared, place[i] = (row[i] * H + g * shared + column % shared) * E;
                low = least(low, from[row[i]]), high = to[row[i]] > high ? to[row[i]] : high;
            }
            high = least(high, P * T);
            for (int64_t i = 0; i < WIDE; i++) {
                first[i] = from[row[i]] - low, last[i] = least(to[row[i]], high) - low;
                rows[i] = i < queries ? q + place[i] : nothing;
            }
            arrange(rows, E, tile);
            for (int64_t s = low; s < high; s++) at[s - low] = ((pages[b * P + s / T] * T + s % T) * G + g) * E;
            for (int64_t s = 0; s < high - low; s += TALL) {
                for (int64_t i = 0; i < TALL; i++) rows[i] = k + at[least(s + i, high - low - 1)];
                multiply(rows, 0, tile, E, score + s * WIDE, WIDE, high - low - s, WIDE, 1);
            }
            softmax(score, high - low, first, last, 1 / sqrtf(E));
            for (int64_t e = 0; e < E; e += TALL) {
                for (int64_t i = 0; i < TALL; i++) rows[i] = v + least(e + i, E - 1);
                multiply(rows, at, score, high - low, tile + e * WIDE, WIDE, E - e, WIDE, 1);
            }
            for (int64_t i = 0; i < queries; i += 8) {
                float some[8 * DEEP];
                for (int64_t e = 0; e < E; e += 8) {
                    for (int64_t j = 0; j < 8; j++) rows[j] = tile + (e + j) * WIDE;
                    transpose(rows, i, some + e, E);
                }
                for (int64_t j = 0; j < least(8, queries - i); j++)
                    memcpy(out + place[i + j], some + j * E, E * sizeof *out);
            }
        }
        free(score), free(at);
    }
    return failed;
}

/* The factor that gives a vector a mean square of 1. */
INLINE float inverse_rms(const float *x, int64_t n, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / n + eps);
}

/* sum[R, D] = x + delta, and out[R, D], its RMSNorm times the weight. Without a delta the sum is x, and not written. */
int dinfer_add_rms_norm(const float *x, const float *delta, const float *weight, float *sum, float *out, int64_t R, int64_t D,
                         float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++) {
        const float *row = x + r * D;
        float *to = out + r * D;
        if (delta) {
            for (int64_t i = 0; i < D; i++) sum[r * D + i] = row[i] + delta[r * D + i];
            row = sum + r * D;
        }
        float by = inverse_rms(row, D, eps);
        for (int64_t i = 0; i < D; i++) to[i] = row[i] * by * weight[i];
    }
    return 0;
}

/* out[R, M] = silu(gate) * up, the halves of x[R, 2 M]. */
int dinfer_swiglu(const float *x, float *out, int64_t R, int64_t M, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++) {
        const float *gate = x + r * 2 * M, *up = gate + M;
        float *to = out + r * M;
#pragma omp simd
        for (int64_t i = 0; i < M; i++) to[i] = gate[i] / (1 + power(-gate[i])) * up[i];
    }
    return 0;
}

/* Norms (unless `weight` is 0) and rotates the queries and keys of x[R, H + 2 G, E]. Queries go to q[R, H, E], keys and
   values of row r to place write[r] of k and v[, G, E]. `cosine` and `sine`, signed, are [R, D]; entries behind D stay. */
int dinfer_rotate_and_store(const float *x, const float *cosine, const float *sine, const float *weight, const int64_t *write,
                             float *q, float *k, float *v, int64_t R, int64_t H, int64_t G, int64_t E, int64_t D, float eps,
                             int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++) {
        const float *turn = cosine + r * D, *side = sine + r * D;
        for (int64_t h = 0; h < H + G; h++) {
            const float *from = x + (r * (H + 2 * G) + h) * E, *scale = weight ? weight + (h < H ? 0 : E) : 0;
            float *to = h < H ? q + (r * H + h) * E : k + (write[r] * G + h - H) * E, normed[DEEP];
            if (scale) {
                float by = inverse_rms(from, E, eps);
                for (int64_t i = 0; i < E; i++) normed[i] = from[i] * by * scale[i];
                from = normed;
            }
            for (int64_t i = 0; i < D / 2; i++) {
                int64_t j = i + D / 2;
                to[i] = from[i] * turn[i] + from[j] * side[i], to[j] = from[j] * turn[j] + from[i] * side[j];
            }
            for (int64_t i = D; i < E; i++) to[i] = from[i];
        }
        memcpy(v + write[r] * G * E, x + (r * (H + 2 * G) + H + G) * E, G * E * sizeof *v);
    }
    return 0;
}
