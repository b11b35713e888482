/* The vector tiers of x86-64: the same files with other vectors, each compiled for the instructions of its tier. A further
 * tier (NEON) is one more section with its vector_*.h; one with matrix units has its own products too, see amx.h.
 */
#ifndef LOWBIT_TIERS_H
#define LOWBIT_TIERS_H

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define COMPILER_HAS_AMX
#endif
#endif
#include "problem.h"

/* functions between TARGET(...) and TARGET_END use the instructions of one tier, whatever the rest is compiled for */
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#else
#define TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define TARGET_END PRAGMA(GCC pop_options)
#endif

/* shared between the files of the library, and hidden outside it */
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN int linear_avx2(const struct lowbit_call *);
HIDDEN int linear_avxvnni(const struct lowbit_call *);
HIDDEN int linear_avx512(const struct lowbit_call *);
HIDDEN int linear_avx512_bf16(const struct lowbit_call *);
HIDDEN int linear_amx(const struct lowbit_call *);
HIDDEN int rows_avx2(struct rows_job *);
HIDDEN int rows_avx512(struct rows_job *);

#endif
