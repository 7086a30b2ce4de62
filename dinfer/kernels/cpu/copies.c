/* Copies memory past the caches, and sees on the way whether a float is NaN or infinite.

   A copy by parts through the caches first reads what it writes to, which is half as much again.

   An exponent of ones is that of NaN and of infinity: one more carries into the bit above, which is the sign's. A word of
   32 bits holds one float or two. */

#include "vectors.h"

#define PART (1 << 16) /* words */

static uint32_t copied(const uint32_t *from, uint32_t *to, int64_t words, uint32_t exponent, uint32_t lowest) {
    uint32_t seen = 0;
    int64_t i = 0;
    for (; i < words && (uintptr_t)(to + i) % 32; i++) seen |= ((to[i] = from[i]) & exponent) + lowest;
    __m256i ones = _mm256_set1_epi32((int)exponent), least = _mm256_set1_epi32((int)lowest), all[2];
    all[0] = all[1] = _mm256_setzero_si256();
    for (; i + 16 <= words; i += 16)
        for (int k = 0; k < 2; k++) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(from + i) + k);
            _mm256_stream_si256((__m256i *)(to + i) + k, x);
            all[k] = _mm256_or_si256(all[k], _mm256_add_epi32(_mm256_and_si256(x, ones), least));
        }
    uint32_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, _mm256_or_si256(all[0], all[1]));
    for (int k = 0; k < 8; k++) seen |= lanes[k];
    for (; i < words; i++) seen |= ((to[i] = from[i]) & exponent) + lowest;
    return seen;
}

/* `above`: the bits that a carry reaches. `broken`: not 0 if a float is not finite. */
int dinfer_copy(const uint32_t *from, uint32_t *to, int64_t words, int64_t exponent, int64_t lowest, int64_t above,
                int64_t *broken, int64_t threads) {
    uint32_t seen = 0;
#pragma omp parallel num_threads(threads) reduction(| : seen)
    {
#pragma omp for
        for (int64_t first = 0; first < words; first += PART)
            seen |= copied(from + first, to + first, words - first < PART ? words - first : PART, (uint32_t)exponent,
                           (uint32_t)lowest);
        _mm_sfence();
    }
    *broken = seen & (uint32_t)above;
    return 0;
}
