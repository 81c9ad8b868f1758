// What the C programs here have in common: a check that names its place.
#ifndef CHECK_H
#define CHECK_H

#include "vramalloc.h"

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

#endif
