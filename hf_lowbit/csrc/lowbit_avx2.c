/* The tiers of AVX2, without and with VNNI. */
#define _GNU_SOURCE
#include "tiers.h"

#if defined(__x86_64__)
#include "parallel.h"
#include "names.h"

TARGET("avx2,fma,f16c")
#define T(name) name##_avx2
#include "vector_avx2.h"
#include "tier.h"
#include "rows.h"
#include "end_tier.h"
#undef T
TARGET_END

TARGET("avx2,fma,f16c,avxvnni")
#define VNNI
#define T(name) name##_avxvnni
#include "vector_avx2.h"
#include "tier.h"
#include "end_tier.h"
#undef T
#undef VNNI
TARGET_END
#endif
