/* Draws of tokens, and how probable they were. A draw is the largest of logits plus scaled Gumbel noise, which is a function of
   seed, position, step and token.

   The noise of token v is -log(-log u). It can only win if 1 - u, which is at most -log u, is below what the best score so
   far leaves room for. That is seen without a logarithm, and rules out almost all of a vocabulary.

   Shapes: R rows, L positions, V vocabulary. */

#include "vectors.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define CHUNK 64

/* splitmix64's finaliser, as `dinfer.core.kernels.random` has it. */
INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static double gumbel(uint64_t bits) { return -log(-log(((double)(bits >> 12) + 0.5) * 0x1p-52)); }

/* The first of the largest of n floats that is larger than `highest`; -1: there is none. */
INLINE int64_t first_largest(const float *x, int64_t n, float *highest) {
    float most = *highest;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    if (!(most > *highest)) return -1;
    *highest = most;
    for (int64_t i = 0; i < n; i++)
        if (x[i] == most) return i;
    return -1;
}

/* The best of the tokens but `mask` (-1: there is none), its score and that of the mask, where `wanted`; elsewhere 0. */
int dinfer_draw(const float *logits, const double *scale, const int64_t *seed, const int64_t *pos, const int64_t *step,
                const uint8_t *wanted, int64_t *token, double *score, double *lure, int64_t R, int64_t L, int64_t V,
                int64_t mask, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < R * L; i++) {
        token[i] = 0, score[i] = lure[i] = 0;
        if (!wanted[i]) continue;
        const float *row = logits + i * V;
        int64_t r = i / L, head = mask < 0 ? 0 : mask;
        double by = scale[r];
        uint64_t start = mix(mix(mix(GOLDEN + seed[r]) + GOLDEN + pos[i]) + GOLDEN + step[r]) + GOLDEN;
        float highest = -INFINITY;
        int64_t at = first_largest(row, head, &highest), tail = mask < 0 ? 0 : mask + 1;
        int64_t behind = first_largest(row + tail, V - tail, &highest);
        at = behind >= 0 ? tail + behind : at;
        lure[i] = mask < 0 ? -INFINITY : row[mask] + by * gumbel(mix(start + mask));
        if (at < 0) {
            score[i] = -INFINITY;
            continue;
        }
        double best = row[at] + by * gumbel(mix(start + at));
        for (int64_t first = 0; by > 0 && first < V; first += CHUNK) {
            uint64_t bits[CHUNK];
            int32_t maybe[CHUNK], any = 0;
            int64_t n = least(CHUNK, V - first);
            float above = (float)best, inverse = (float)(1 / by);
#pragma omp simd reduction(| : any)
            for (int64_t j = 0; j < n; j++) {
                bits[j] = mix(start + first + j);
                float rest = (float)(int32_t)(~bits[j] >> 40) * 0x1p-24f; /* 1 - u, rounded down */
                maybe[j] = rest < 1.0001f * power((row[first + j] - above) * inverse);
                any |= maybe[j];
            }
            for (int64_t j = 0; any && j < n; j++) {
                int64_t v = first + j;
                if (!maybe[j] || v == mask) continue;
                double own = row[v] + by * gumbel(bits[j]);
                if (own > best || (own == best && v < at)) best = own, at = v;
            }
        }
        token[i] = at, score[i] = best;
    }
    return 0;
}

/* The sum of e^((x - highest) by) over n logits. */
INLINE double powers(const float *x, int64_t n, float highest, float by) {
    double total = 0;
    for (int64_t first = 0; first < n; first += CHUNK) {
        float sum = 0;
        int64_t here = least(CHUNK, n - first);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < here; j++) sum += power((x[first + j] - highest) * by);
        total += sum;
    }
    return total;
}

/* The most likely of the tokens but `mask` (-1: there is none), its probability (NaN: it has none) and that of the mask, where
   `wanted`; elsewhere 0. */
int dinfer_token_stats(const float *logits, const uint8_t *wanted, int64_t *token, float *confidence, float *masked, int64_t N,
                       int64_t V, int64_t mask, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < N; i++) {
        token[i] = 0, confidence[i] = masked[i] = 0;
        if (!wanted[i]) continue;
        const float *row = logits + i * V;
        float best = -INFINITY, lure = mask < 0 ? -INFINITY : row[mask];
        int64_t head = mask < 0 ? 0 : mask, tail = mask < 0 ? 0 : mask + 1, at = first_largest(row, head, &best);
        int64_t behind = first_largest(row + tail, V - tail, &best);
        token[i] = behind >= 0 ? tail + behind : at >= 0 ? at : 0;
        float highest = lure > best ? lure : best;
        double total = powers(row, V, highest, 1);
        confidence[i] = best > -INFINITY ? (float)(power(best - highest) / total) : NAN;
        masked[i] = lure > -INFINITY ? (float)(power(lure - highest) / total) : lure == lure ? 0 : NAN;
    }
    return 0;
}

/* The logarithm of the sum of e^(logit / scale) over the vocabulary, where `wanted`; elsewhere 0. */
int dinfer_log_sums(const float *logits, const float *scale, const uint8_t *wanted, float *out, int64_t R, int64_t L, int64_t V,
                    int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < R * L; i++) {
        const float *row = logits + i * V;
        float highest = -INFINITY, by = 1 / scale[i / L];
        out[i] = 0;
        if (!wanted[i]) continue;
        if (first_largest(row, V, &highest) < 0) highest = 0; /* all are -inf, or none is a number */
        out[i] = highest * by + (float)log(powers(row, V, highest, by));
    }
    return 0;
}
