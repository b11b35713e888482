/* What this processor and its operating system can do: CPUID says what the chip has, XCR0 what the system saves. */
#ifndef LOWBIT_PROCESSOR_H
#define LOWBIT_PROCESSOR_H

#include <stdint.h>

/* AVX512_BF16 refines a tier, it isn't one of its own */
enum {
    FEATURE_AVX2 = 1,        /* AVX2, FMA, F16C */
    FEATURE_AVX_VNNI = 2,
    FEATURE_AVX512 = 4,      /* F, BW, VL, DQ, VBMI, VNNI */
    FEATURE_AVX512_BF16 = 8,
    FEATURE_AMX = 16,        /* tiles of int8 and bfloat16, allowed by the system, beside both of AVX512 */
};

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline uint64_t read_xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* tiles are saved for a process only after it has asked (Linux 5.16); threads and children inherit the permission */
static int tiles_are_permitted(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static int detect_features(void) {
    unsigned a, b, c, d, features = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    unsigned osxsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1, avx = c >> 28 & 1;
    if (!osxsave || !avx) return 0;
    uint64_t saved = read_xcr0();
    if ((saved & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    unsigned ebx = b, ecx = c, edx = d, deepest = a;
    unsigned extended = 0;
    if (deepest >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) extended = a;
    if ((ebx >> 5 & 1) && fma && f16c) features |= FEATURE_AVX2;
    if ((features & FEATURE_AVX2) && (extended >> 4 & 1)) features |= FEATURE_AVX_VNNI;
    unsigned avx512 = (ebx >> 16 & 1) & (ebx >> 17 & 1) & (ebx >> 30 & 1) & (ebx >> 31 & 1);
    unsigned vbmi = ecx >> 1 & 1, vnni = ecx >> 11 & 1;
    if ((features & FEATURE_AVX2) && avx512 && vbmi && vnni && (saved & 0xe0) == 0xe0) {
        features |= FEATURE_AVX512;
        if (extended >> 5 & 1) features |= FEATURE_AVX512_BF16;
    }
    unsigned tiles = (edx >> 22 & 1) & (edx >> 24 & 1) & (edx >> 25 & 1);
    if ((features & FEATURE_AVX512_BF16) && tiles && (saved >> 17 & 3) == 3 && tiles_are_permitted())
        features |= FEATURE_AMX;
    return (int)features;
}
#else
static int detect_features(void) { return 0; }
#endif

#endif
