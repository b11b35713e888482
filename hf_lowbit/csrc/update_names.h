/* Names of one tier of the update; included again at its end, after END_TIER is defined, to free them. */
#ifndef END_TIER
#define vf T(vf)
#define vi T(vi)
#define vu T(vu)
#define vh T(vh)
#define constants T(constants)
#define sums T(sums)
#define place T(place)
#define widen T(widen)
#define widen_signed T(widen_signed)
#define narrow T(narrow)
#define smaller T(smaller)
#define larger T(larger)
#define smaller_f T(smaller_f)
#define absolute T(absolute)
#define roots T(roots)
#define rounded_up T(rounded_up)
#define different T(different)
#define largest T(largest)
#define spread T(spread)
#define join T(join)
#define load T(load)
#define load_f T(load_f)
#define load_half T(load_half)
#define store T(store)
#define store_f T(store_f)
#define store_half T(store_half)
#define all T(all)
#define all_f T(all_f)
#define shift_right T(shift_right)
#define mix T(mix)
#define noise_of_m T(noise_of_m)
#define noise_of_v T(noise_of_v)
#define before_end T(before_end)
#define sum_of T(sum_of)
#define load_gradient T(load_gradient)
#define read_moment T(read_moment)
#define fields_of T(fields_of)
#define base_of T(base_of)
#define along T(along)
#define step T(step)
#define step_rest T(step_rest)
#define save T(save)
#define work T(work)
#define work_adamw T(work_adamw)
#define moment_bytes T(moment_bytes)
#define open_moment T(open_moment)
#define close_moment T(close_moment)
#define open_codes T(open_codes)
#define close_codes T(close_codes)
#define load_scales T(load_scales)
#define update_range T(update_range)
#else
#undef vf
#undef vi
#undef vu
#undef vh
#undef constants
#undef sums
#undef place
#undef widen
#undef widen_signed
#undef narrow
#undef smaller
#undef larger
#undef smaller_f
#undef absolute
#undef roots
#undef rounded_up
#undef different
#undef largest
#undef spread
#undef join
#undef load
#undef load_f
#undef load_half
#undef store
#undef store_f
#undef store_half
#undef all
#undef all_f
#undef shift_right
#undef mix
#undef noise_of_m
#undef noise_of_v
#undef before_end
#undef sum_of
#undef load_gradient
#undef read_moment
#undef fields_of
#undef base_of
#undef along
#undef step
#undef step_rest
#undef save
#undef work
#undef work_adamw
#undef moment_bytes
#undef open_moment
#undef close_moment
#undef open_codes
#undef close_codes
#undef load_scales
#undef update_range
#undef T
#undef LANES
#undef END_TIER
#endif
