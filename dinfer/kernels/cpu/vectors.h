/* Vectors of floats: AVX-512 if the compiler finds it, otherwise AVX2. */

#ifndef DINFER_VECTORS
#define DINFER_VECTORS
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512BW__
#define LANES 16 /* floats of a vector */
typedef __m512 Floats;
#define LOAD_FLOATS _mm512_loadu_ps
#define STORE_FLOATS _mm512_storeu_ps
#define FLOAT_ZERO _mm512_setzero_ps()
#define EACH_FLOAT _mm512_set1_ps
#define TO_FLOATS _mm512_cvtepi32_ps
#define ADD_FLOATS _mm512_add_ps
#define MULTIPLY _mm512_mul_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define OF_BFLOATS(x) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x))), 16))
#else
#define LANES 8
typedef __m256 Floats;
#define LOAD_FLOATS _mm256_loadu_ps
#define STORE_FLOATS _mm256_storeu_ps
#define FLOAT_ZERO _mm256_setzero_ps()
#define EACH_FLOAT _mm256_set1_ps
#define TO_FLOATS _mm256_cvtepi32_ps
#define ADD_FLOATS _mm256_add_ps
#define MULTIPLY _mm256_mul_ps
#define MULTIPLY_ADD _mm256_fmadd_ps
#define OF_BFLOATS(x) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x))), 16))
#endif

/* e to the power of x, to about 1e-7 of it, for x up to 88; NaN stays NaN. (The polynomial of Cephes' expf.) */
INLINE float power(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f, p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
