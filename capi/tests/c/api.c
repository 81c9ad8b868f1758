// Every function of the interface, used well and badly. Usage: api DEVICE [SNAPSHOT]
#include "check.h"

#include <pthread.h>

static const uint64_t MIB = 1 << 20;

static vram_stats stats_of(vram_allocator allocator) {
    vram_stats stats;
    OK(vram_get_stats(allocator, 0, &stats, sizeof stats));
    return stats;
}

static void used_well(vram_allocator allocator, const char *snapshot) {
    void *stream = NULL, *other = NULL, *a = NULL, *b = NULL, *none = &a;
    OK(vram_record_history(allocator, -1, 1000, VRAM_STACKS_OFF));
    OK(vram_create_stream(allocator, 0, &stream));
    OK(vram_create_stream(allocator, 0, &other));
    OK(vram_alloc(allocator, 30 * MIB, 0, stream, &a));
    OK(vram_alloc(allocator, 1000, 0, NULL, &b));
    OK(vram_alloc(allocator, 0, 0, stream, &none));
    CHECK(a != NULL && b != NULL && a != b && none == NULL);

    vram_stats stats = stats_of(allocator);
    CHECK(stats.allocation.all.current == 2 && stats.requested_bytes.small_pool.current == 1000);
    CHECK(stats.allocated_bytes.all.current == 30 * MIB + 1024);
    CHECK(stats.reserved_bytes.all.current >= 30 * MIB + 1024 && stats.max_split_size == -1);

    // An older header's struct: nothing is written behind it.
    vram_stats older;
    memset(&older, 0xAB, sizeof older);
    OK(vram_get_stats(allocator, 0, &older, sizeof(vram_stat_array)));
    CHECK(older.allocation.all.current == 2 && older.allocated_bytes.all.current == 0xABABABABABABABABu);

    size_t needed = 0;
    OK(vram_stats_json(allocator, 0, NULL, 0, &needed));
    char *text = malloc(needed);
    FAILS(BUFFER_TOO_SMALL, vram_stats_json(allocator, 0, text, needed - 1, NULL));
    OK(vram_stats_json(allocator, 0, text, needed, &needed));
    CHECK(strlen(text) + 1 == needed && strstr(text, "\"requested_bytes.small_pool.current\":1000"));
    free(text);
    OK(vram_memory_summary(allocator, 0, NULL, 0, &needed));
    text = malloc(needed);
    OK(vram_memory_summary(allocator, 0, text, needed, NULL));
    CHECK(strstr(text, "GPU reserved memory"));
    puts(text);
    free(text);
    OK(vram_memory_summary_abbreviated(allocator, 0, NULL, 0, &needed));
    text = malloc(needed);
    OK(vram_memory_summary_abbreviated(allocator, 0, text, needed, NULL));
    CHECK(strstr(text, "GPU reserved memory") && !strstr(text, "from small pool"));
    free(text);
    OK(vram_driver_calls_json(allocator, 0, NULL, 0, &needed));
    text = malloc(needed);
    OK(vram_driver_calls_json(allocator, 0, text, needed, NULL));
    CHECK(strstr(text, "\"calls\":") && (strstr(text, "\"cuMemAlloc\"") || strstr(text, "\"cuMemMap\"")));
    free(text);
    if (snapshot) OK(vram_snapshot(allocator, 0, snapshot));
    OK(vram_stop_history(allocator, 0));
    OK(vram_stop_history(allocator, -1));

    OK(vram_record_stream(allocator, a, 0, other));
    OK(vram_free(allocator, a, 30 * MIB, 0, stream));
    OK(vram_free(allocator, b, 0, 0, other)); // was used there last
    OK(vram_free(allocator, NULL, 0, 0, NULL));
    OK(vram_retire_stream(allocator, 0, other));
    const uint64_t freed = emptied(allocator);
    OK(vram_empty_cache(allocator, -1, NULL));
    stats = stats_of(allocator);
    CHECK(freed > 30 * MIB && stats.reserved_bytes.all.current == 0 && stats.active.all.current == 0);
    CHECK(stats.allocated_bytes.all.peak == 30 * MIB + 1024);
    OK(vram_reset_peak_stats(allocator, 0));
    OK(vram_reset_accumulated_stats(allocator, 0));
    stats = stats_of(allocator);
    CHECK(stats.allocated_bytes.all.peak == 0 && stats.allocated_bytes.all.allocated == 0);
    OK(vram_validate(allocator, 0));
}

static void used_badly(vram_allocator allocator) {
    vram_allocator refused = 77;
    FAILS(INVALID_ARGUMENT, vram_create("gpu", NULL, &refused));
    FAILS(INVALID_ARGUMENT, vram_create("sim:none", NULL, &refused));
    FAILS(INVALID_ARGUMENT, vram_create("sim", "slack:1.01", NULL));
    FAILS(INVALID_ARGUMENT, vram_create("\xff", NULL, &refused));
    FAILS(INVALID_CONFIG, vram_create("sim", "no_such_key:1", &refused));
    CHECK(strstr(vram_last_error(), "no_such_key") && refused == 77);
    FAILS(NO_DEVICE, vram_create("cuda:63", NULL, &refused));

    void *a = NULL, *b = NULL;
    vram_stats stats;
    const vram_allocator bad[] = {0, 77, allocator + 1, allocator + (1ull << 32), UINT64_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        FAILS(INVALID_HANDLE, vram_alloc(bad[i], 512, 0, NULL, &a));
        FAILS(INVALID_HANDLE, vram_free(bad[i], &a, 512, 0, NULL));
        FAILS(INVALID_HANDLE, vram_record_stream(bad[i], &a, 0, NULL));
        FAILS(INVALID_HANDLE, vram_empty_cache(bad[i], -1, NULL));
        FAILS(INVALID_HANDLE, vram_get_stats(bad[i], 0, &stats, sizeof stats));
        FAILS(INVALID_HANDLE, vram_snapshot(bad[i], 0, "/nowhere"));
        FAILS(INVALID_HANDLE, vram_record_history(bad[i], 0, 1000, VRAM_STACKS_OFF));
        FAILS(INVALID_HANDLE, vram_stop_history(bad[i], -1));
        FAILS(INVALID_HANDLE, vram_driver_calls_json(bad[i], 0, NULL, 0, NULL));
        FAILS(INVALID_HANDLE, vram_destroy(bad[i]));
    }
    const int devices[] = {-1, 1, 63, 64, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof devices / sizeof *devices; ++i)
        FAILS(NO_DEVICE, vram_alloc(allocator, 512, devices[i], NULL, &a));
    CHECK(a == NULL);

    FAILS(INVALID_ARGUMENT, vram_alloc(allocator, 512, 0, NULL, NULL));
    FAILS(INVALID_ARGUMENT, vram_get_stats(allocator, 0, NULL, sizeof stats));
    FAILS(INVALID_ARGUMENT, vram_stats_json(allocator, 0, NULL, 0, NULL));
    FAILS(INVALID_ARGUMENT, vram_snapshot(allocator, 0, NULL));
    FAILS(INVALID_ARGUMENT, vram_record_history(allocator, 0, 1000, 3));
    FAILS(NO_DEVICE, vram_record_history(allocator, 9, 1000, VRAM_STACKS_OFF));
    OK(vram_record_history(allocator, 0, UINT64_MAX, VRAM_STACKS_OFF)); // as many as there are
    OK(vram_stop_history(allocator, 0));
    FAILS(INVALID_ARGUMENT, vram_create_stream(allocator, 0, NULL));
    FAILS(INVALID_ARGUMENT, vram_process_allocator(NULL));
    FAILS(INVALID_CONFIG, vram_set_memory_fraction(allocator, 0, 1.5));
    FAILS(IO, vram_snapshot(allocator, 0, "/no/such/folder/snapshot.json"));

    FAILS(SIZE_OVERFLOW, vram_alloc(allocator, UINT64_MAX, 0, NULL, &a));
    FAILS(OUT_OF_MEMORY, vram_alloc(allocator, 1ull << 50, 0, NULL, &a));
    CHECK(strstr(vram_last_error(), "out of memory on device 0") && a == NULL);

    OK(vram_alloc(allocator, 4096, 0, NULL, &a));
    OK(vram_alloc(allocator, 4096, 0, NULL, &b));
    int on_the_stack = 0;
    FAILS(UNKNOWN_POINTER, vram_free(allocator, &on_the_stack, 0, 0, NULL));
    FAILS(UNKNOWN_POINTER, vram_free(allocator, (char *)a + 512, 0, 0, NULL));
    FAILS(UNKNOWN_POINTER, vram_record_stream(allocator, (char *)a + 512, 0, NULL));
    FAILS(INVALID_ARGUMENT, vram_free(allocator, a, 4097, 0, NULL));
    CHECK(strstr(vram_last_error(), "nothing was freed"));
    OK(vram_free(allocator, a, 4096, 0, NULL));
    FAILS(NOT_LIVE, vram_free(allocator, a, 4096, 0, NULL));
    FAILS(NOT_LIVE, vram_record_stream(allocator, a, 0, NULL));
    OK(vram_free(allocator, b, 4096, 0, (void *)1)); // the default stream's other name

    OK(vram_set_memory_fraction(allocator, 0, 0.0));
    emptied(allocator);
    FAILS(OUT_OF_MEMORY, vram_alloc(allocator, 4096, 0, NULL, &a));
    OK(vram_set_memory_fraction(allocator, 0, 1.0));
    OK(vram_alloc(allocator, 4096, 0, NULL, &a));
    OK(vram_free(allocator, a, 0, 0, NULL));
    OK(vram_validate(allocator, 0));
}

static void *other_thread(void *handle) {
    CHECK(vram_last_error()[0] == '\0'); // of this thread
    FAILS(INVALID_HANDLE, vram_destroy(0));
    void *a = NULL;
    OK(vram_alloc(*(vram_allocator *)handle, 512, 0, NULL, &a));
    return a;
}

int main(int argc, char **argv) {
    CHECK(vram_abi_version() == VRAM_ABI_VERSION);
    CHECK(argc > 1);
    const char *const configs[] = {"segments:fixed", "segments:expandable"};
    for (int i = 0; i < 2; ++i) {
        vram_allocator allocator = 0;
        OK(vram_create(argv[1], configs[i], &allocator));
        CHECK(allocator != 0);
        used_well(allocator, argc > 2 ? argv[2] : NULL);
        used_badly(allocator);

        pthread_t thread;
        void *a = NULL;
        FAILS(NO_DEVICE, vram_alloc(allocator, 1, 9, NULL, &a));
        CHECK(pthread_create(&thread, NULL, other_thread, &allocator) == 0);
        CHECK(pthread_join(thread, &a) == 0 && a != NULL);
        CHECK(strstr(vram_last_error(), "no allocator for that device")); // the other thread has its own
        OK(vram_free(allocator, a, 512, 0, NULL));

        OK(vram_destroy(allocator));
        FAILS(INVALID_HANDLE, vram_destroy(allocator));
        FAILS(INVALID_HANDLE, vram_alloc(allocator, 512, 0, NULL, &a));
    }
    puts("all of the interface works");
    return 0;
}
