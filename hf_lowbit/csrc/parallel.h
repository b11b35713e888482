/* Splits a range over threads.
 *
 * With OpenMP the threads are those of torch: its wheel carries libgomp under the usual name and is loaded first, so both
 * share one pool. A process forked after a parallel region has no such threads, and the runtime would wait for them
 * forever: children run on one thread. Without OpenMP, short-lived POSIX threads do the work.
 *
 * Results never depend on the number of threads: each output is computed whole by one of them.
 */
#ifndef LOWBIT_PARALLEL_H
#define LOWBIT_PARALLEL_H

#include <pthread.h>
#include <stdint.h>

#include "problem.h"

/* does [begin, end) of a job */
typedef void (*range_function)(void *job, int64_t begin, int64_t end);

static volatile int in_forked_child;
static void note_fork(void) { in_forked_child = 1; }
/* at load, not at the first use: another library may have started the pool */
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

struct part { range_function run; void *job; int64_t begin, end; };

static inline struct part part_of(range_function run, void *job, int64_t count, int64_t step, int64_t i, int64_t parts) {
    int64_t pieces = (count + step - 1) / step;
    int64_t begin = pieces * i / parts * step, end = pieces * (i + 1) / parts * step;
    struct part part = {run, job, begin, end < count ? end : count};
    return part;
}

#ifndef _OPENMP
static void *run_part(void *argument) {
    struct part *part = argument;
    part->run(part->job, part->begin, part->end);
    return NULL;
}
#endif

/* run(job, begin, end) over [0, count), cut at multiples of `step` */
static void parallel_for(range_function run, void *job, int64_t count, int64_t step, int threads) {
    int64_t pieces = (count + step - 1) / step;
    if (threads > pieces) threads = (int)pieces;
    if (threads > 64) threads = 64;
    if (threads <= 1 || in_forked_child) {
        if (count > 0) run(job, 0, count);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int i = 0; i < threads; i++) {
        struct part part = part_of(run, job, count, step, i, threads);
        run(job, part.begin, part.end);
    }
#else
    pthread_t ids[64];
    struct part parts[64];
    int started[64];
    for (int i = 1; i < threads; i++) {
        parts[i] = part_of(run, job, count, step, i, threads);
        started[i] = pthread_create(&ids[i], NULL, run_part, &parts[i]) == 0;
    }
    parts[0] = part_of(run, job, count, step, 0, threads);
    run(job, parts[0].begin, parts[0].end);
    for (int i = 1; i < threads; i++) {
        if (started[i]) pthread_join(ids[i], NULL);
        else run(job, parts[i].begin, parts[i].end);
    }
#endif
}

/* run(job, begin, end) over the rows of each weight that multiplies x; x is prepared. A job begins with its call */
static inline void parallel_rows(range_function run, void *job, int64_t step) {
    const struct lowbit_call **call = job;
    const struct lowbit_call *first = *call;
    for (; *call; *call = (*call)->next) parallel_for(run, job, (*call)->p->rows, step, (*call)->threads);
    *call = first;
}

/* run(job, i, i + 1) for each of [0, count), which may differ in work: a thread that is free takes the next */
static inline void parallel_each(range_function run, void *job, int64_t count, int threads) {
#ifdef _OPENMP
    if (threads > count) threads = (int)count;
    if (threads > 1 && !in_forked_child) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) run(job, i, i + 1);
        return;
    }
#endif
    parallel_for(run, job, count, 1, threads);
}

#endif
