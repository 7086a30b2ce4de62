/* Vectors of floats: AVX-512 if the compiler finds it, otherwise AVX2. */

#ifndef DINFER_VECTORS
#define DINFER_VECTORS
#include <immintrin.h>
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
#endif

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
