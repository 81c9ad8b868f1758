// What the C programs here have in common: a check that names its place.
#ifndef CHECK_H
#define CHECK_H

#include "vramalloc.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: failed: %s\n  last error: %s\n", __FILE__, __LINE__,         \
                    #condition, vram_last_error());                                              \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

#define OK(call) CHECK((call) == VRAM_STATUS_OK)
#define FAILS(status, call) CHECK((call) == VRAM_STATUS_##status && vram_last_error()[0] != '\0')

// Empties the cache of a device on which nothing runs any more. A GPU needs a moment until it admits that, and
// vram_empty_cache waits for nothing.
static inline uint64_t emptied(vram_allocator allocator) {
    uint64_t bytes = 0;
    vram_stats stats;
    for (int i = 0; i < 1000; ++i) {
        uint64_t freed = 0;
        OK(vram_empty_cache(allocator, 0, &freed));
        bytes += freed;
        OK(vram_get_stats(allocator, 0, &stats, sizeof stats));
        if (stats.reserved_bytes.all.current == 0) break;
    }
    return bytes;
}

#endif
