#ifndef VRAMALLOC_H
#define VRAMALLOC_H

#include <stddef.h>
#include <stdint.h>

// The version of this interface. It changes when a function changes its signature or its meaning; what is only added
// does not count.
#define VRAM_ABI_VERSION 1

// `vram_record_history`: no call stacks.
#define VRAM_STACKS_OFF 0

// `vram_record_history`: the call stacks of allocations.
#define VRAM_STACKS_ALLOC 1

// `vram_record_history`: the call stacks of allocations and frees.
#define VRAM_STACKS_ALL 2

// What a call answers. `vram_last_error` has the text.
typedef enum {
  // It is done.
  VRAM_STATUS_OK = 0,
  // A pointer is null that must not be, a text is not UTF-8, or a number makes no sense.
  VRAM_STATUS_INVALID_ARGUMENT = 1,
  // The handle is null, destroyed, or none at all.
  VRAM_STATUS_INVALID_HANDLE = 2,
  // The configuration string is not understood, or the device cannot do what it says.
  VRAM_STATUS_INVALID_CONFIG = 3,
  // There is no such device, or it cannot be opened.
  VRAM_STATUS_NO_DEVICE = 4,
  // Everything has been tried; the text is the report.
  VRAM_STATUS_OUT_OF_MEMORY = 5,
  // The size is beyond any device.
  VRAM_STATUS_SIZE_OVERFLOW = 6,
  // The address was freed before.
  VRAM_STATUS_NOT_LIVE = 7,
  // The address is not the start of an allocation of this allocator.
  VRAM_STATUS_UNKNOWN_POINTER = 8,
  // The stream is another device's.
  VRAM_STATUS_WRONG_DEVICE = 9,
  // The driver failed, and not for want of memory.
  VRAM_STATUS_DRIVER = 10,
  // The buffer is too small for the text; nothing was written to it.
  VRAM_STATUS_BUFFER_TOO_SMALL = 11,
  // A file could not be written.
  VRAM_STATUS_IO = 12,
  // The process was forked; only the parent may use the device.
  VRAM_STATUS_FORKED = 13,
  // A bug in this library, caught.
  VRAM_STATUS_INTERNAL = 14,
} vram_status;

// An allocator. 0 is none.
typedef uint64_t vram_allocator;

// A counter.
typedef struct {
  // Now.
  uint64_t current;
  // The highest since the last reset of peaks.
  uint64_t peak;
  // All that came, since the last reset of sums.
  uint64_t allocated;
  // All that went, since the last reset of sums.
  uint64_t freed;
} vram_stat;

// A counter over all memory, and by size class.
typedef struct {
  // Both classes.
  vram_stat all;
  // Requests above 1 MiB.
  vram_stat large_pool;
  // Requests up to 1 MiB.
  vram_stat small_pool;
} vram_stat_array;

// The statistics of a device. Fields are only ever added, at the end.
typedef struct {
  // Allocations held by users.
  vram_stat_array allocation;
  // Their bytes, in blocks.
  vram_stat_array allocated_bytes;
  // Their bytes, as asked for.
  vram_stat_array requested_bytes;
  // Allocations that are held, or freed and still used by queued work.
  vram_stat_array active;
  // Their bytes.
  vram_stat_array active_bytes;
  // Segments reserved from the driver (fixed segments).
  vram_stat_array segment;
  // Bytes reserved from the driver.
  vram_stat_array reserved_bytes;
  // Cached blocks in segments that are partly in use.
  vram_stat_array inactive_split;
  // Their bytes.
  vram_stat_array inactive_split_bytes;
  // Allocations of max_split_size and more.
  vram_stat oversize_allocations;
  // Segments of that size.
  vram_stat oversize_segments;
  // How often everything cached was given back to serve a request.
  uint64_t num_alloc_retries;
  // How often memory ran out.
  uint64_t num_ooms;
  // How often queued work was waited for.
  uint64_t num_sync_all_streams;
  // Driver calls that reserved or mapped.
  uint64_t num_device_alloc;
  // Driver calls that gave back or unmapped.
  uint64_t num_device_free;
  // max_split_size in bytes; -1 if there is none.
  int64_t max_split_size;
} vram_stats;

// The number of a pool (C++: `std::pair<unsigned long long, unsigned long long>`, passed by value).
typedef struct {
  // Counts pools that captures made.
  uint64_t first;
  // Counts pools that users made.
  uint64_t second;
} vram_pool_id;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the interface that the library has: compare with `VRAM_ABI_VERSION` of the header.
uint32_t vram_abi_version(void);

// Makes an allocator.
//
// `device`: `cuda` for all GPUs of the process, each opened when it is first used; `cuda:N` for that one; `sim` or
// `sim:4GiB` for a simulated device, which has the number 0; `auto` for the GPUs if there are any, else `sim`. Null is
// `auto`. `config`: a configuration string as in VRAMALLOC_CONF; null takes that variable.
//
// # Safety
// `device` and `config` are null or strings that end in a zero byte; `out` can be written.
vram_status vram_create(const char *device,
                        const char *config,
                        vram_allocator *out);

// The allocator of the process, which the functions for PyTorch and CuPy use: configured by VRAMALLOC_CONF, on the
// devices of VRAMALLOC_DEVICE (as `device` of `vram_create`; `cuda` if it is not set). It cannot be destroyed.
//
// # Safety
// `out` can be written.
vram_status vram_process_allocator(vram_allocator *out);

// Destroys an allocator: its cached memory goes back. What is still allocated stays valid for the life of the process,
// and can no more be freed; VRAMALLOC_LOG=warn lists it.
vram_status vram_destroy(vram_allocator allocator);

// Allocates `bytes` on `device` (by number) for use on `stream` (a `cudaStream_t`; null is the default stream), and
// writes the device address to `out`. Zero bytes are legal: null.
//
// A stream that is destroyed while the allocator lives is to be announced before: `vram_retire_stream`.
//
// # Safety
// `stream` is a stream of the device that exists; `out` can be written.
vram_status vram_alloc(vram_allocator allocator,
                       uint64_t bytes,
                       int device,
                       void *stream,
                       void **out);

// Frees what `vram_alloc` gave. Null is nothing.
//
// `bytes` is what was asked for, or 0 for "not known". `stream` is the one that used the memory last; if it is not the
// one that it was allocated on, the memory is not reused before what is queued on it by now has passed.
//
// # Safety
// `stream` is the stream of the allocation, or one of the device that exists.
vram_status vram_free(vram_allocator allocator,
                      void *ptr,
                      uint64_t bytes,
                      int device,
                      void *stream);

// Announces that work on `stream` uses the allocation at `ptr`: once freed, it is not reused before what is queued on
// `stream` by then has passed.
//
// # Safety
// `stream` is a stream of the allocation's device that exists.
vram_status vram_record_stream(vram_allocator allocator,
                               void *ptr,
                               int device,
                               void *stream);

// Makes a stream, for programs that have no CUDA runtime or use a simulated device. It lives as long as the allocator.
//
// # Safety
// `out` can be written.
vram_status vram_create_stream(vram_allocator allocator,
                               int device,
                               void **out);

// To be called before a stream is destroyed that was used with the allocator: the driver gives its handle to another
// stream, and nothing else tells the two apart.
//
// # Safety
// `stream` is a stream of the device that exists.
vram_status vram_retire_stream(vram_allocator allocator,
                               int device,
                               void *stream);

// Gives all cached memory back to the driver, of `device` or, if that is negative, of every device used so far. Writes
// the bytes to `freed`, if that is not null. Waits for no work: what is still used by then, as far as the driver has
// noticed, stays cached.
//
// # Safety
// `freed` is null or can be written.
vram_status vram_empty_cache(vram_allocator allocator,
                             int device,
                             uint64_t *freed);

// Lets another device (by number) use all memory of expandable segments of `device`, now and later. For fixed segments
// that is what `cudaDeviceEnablePeerAccess` does.
vram_status vram_grant_access(vram_allocator allocator,
                              int device,
                              int peer);

// Caps reserved memory at a part of the device's, 0 to 1; 1 is no cap.
vram_status vram_set_memory_fraction(vram_allocator allocator, int device, double fraction);

// Allocates for CuPy, from the process's own allocator. CuPy passes no stream: `param` is the one (a number in Python,
// 0 for the default stream) that all arrays of this CuPy allocator are used on.
//
// If that fails it returns null, which CuPy does not check; the report goes to standard error first.
//
// # Safety
// `param` is null or a stream of the device that exists.
void *vram_cupy_malloc(void *param,
                       uintptr_t size,
                       int ordinal);

// Frees for CuPy.
void vram_cupy_free(void *param, void *ptr, int ordinal);

// Starts recording what the allocator does on `device` or, if that is negative, on every device used so far or later.
// The newest `events` are kept (64 bytes each); with 0 only what is live is known better: its age. `vram_snapshot` then
// writes them, too. What was recorded before is forgotten. From the start, before anything is allocated: the key
// `history` of the configuration.
//
// `stacks` is one of VRAM_STACKS_...: the functions (not Python's) that led to an event. That takes some microseconds an
// event, and a library that was built with the feature `stacks`.
vram_status vram_record_history(vram_allocator allocator,
                                int device,
                                uint64_t events,
                                uint32_t stacks);

// Stops recording on `device` or, if that is negative, on every one, and forgets what was recorded.
vram_status vram_stop_history(vram_allocator allocator, int device);

// Writes every segment and block of a device to a file or, if `device` is negative, of every device used so far; and the
// events if a history is recorded. It has the schema of PyTorch's memory snapshots: as JSON if the name ends in `.json`,
// else as a pickle, which `pytorch.org/memory_viz` opens.
//
// # Safety
// `path` is a string that ends in a zero byte.
vram_status vram_snapshot(vram_allocator allocator,
                          int device,
                          const char *path);

// Writes the statistics of a device to `out`, of which the caller says the size (`sizeof(vram_stats)`), so that a
// program built with an older header gets the fields that it knows.
//
// # Safety
// `out` points to `size` bytes that can be written.
vram_status vram_get_stats(vram_allocator allocator, int device, vram_stats *out, uintptr_t size);

// Writes the statistics as a JSON object with PyTorch's keys (`allocated_bytes.all.peak`) to `buffer`, ended by a zero
// byte. `needed`, if it is not null, gets the bytes that this takes; a null buffer of capacity 0 asks for that only.
//
// # Safety
// `buffer` is null or has `capacity` bytes that can be written; `needed` is null or can be written.
vram_status vram_stats_json(vram_allocator allocator,
                            int device,
                            char *buffer,
                            uintptr_t capacity,
                            uintptr_t *needed);

// Writes how often each function of the driver was called for a device, and the seconds that took, as a JSON object
// (`{"cuMemMap": {"calls": 3, "seconds": 0.0001}}`); as `vram_stats_json`. Nothing starts these anew.
//
// # Safety
// As `vram_stats_json`.
vram_status vram_driver_calls_json(vram_allocator allocator,
                                   int device,
                                   char *buffer,
                                   uintptr_t capacity,
                                   uintptr_t *needed);

// Writes the statistics as a table for people, with the rows of `torch.cuda.memory_summary()`; as `vram_stats_json`.
//
// # Safety
// As `vram_stats_json`.
vram_status vram_memory_summary(vram_allocator allocator,
                                int device,
                                char *buffer,
                                uintptr_t capacity,
                                uintptr_t *needed);

// The same table without the rows by size class.
//
// # Safety
// As `vram_stats_json`.
vram_status vram_memory_summary_abbreviated(vram_allocator allocator,
                                            int device,
                                            char *buffer,
                                            uintptr_t capacity,
                                            uintptr_t *needed);

// Starts the peaks of a device anew, from what is current.
vram_status vram_reset_peak_stats(vram_allocator allocator, int device);

// Starts the running sums and event counters of a device anew.
vram_status vram_reset_accumulated_stats(vram_allocator allocator, int device);

// Walks every structure of a device's allocator and checks that it is sound. For tests; it takes time.
vram_status vram_validate(vram_allocator allocator, int device);

// The text of this thread's last failure; empty if it had none. Valid until the thread's next failure; it is not to be
// freed.
const char *vram_last_error(void);

// Allocates for PyTorch as its current allocator (`alloc_fn_name`).
//
// If that fails it returns null, **which PyTorch does not check**: the tensor then has no memory, and the next kernel
// that uses it ends the process's CUDA context. So the report goes to standard error first.
//
// # Safety
// `stream` is a stream of the device that exists.
void *vram_torch_alloc(uintptr_t size,
                       int ordinal,
                       void *stream);

// Frees for PyTorch (`free_fn_name`). Size, device and stream are those of the allocation; the stream may be gone.
void vram_torch_free(void *ptr, uintptr_t _size, int ordinal, void *_stream);

// Allocates a segment for a `torch.cuda.MemPool`: null means out of memory there, which PyTorch handles.
//
// # Safety
// `stream` is a stream of the device that exists.
void *vram_torch_segment_alloc(uintptr_t size, int ordinal, void *stream);

// Takes a segment of a `torch.cuda.MemPool` back, and gives what it can to the driver: PyTorch is what caches here.
void vram_torch_segment_free(void *ptr,
                             uintptr_t _size,
                             int ordinal,
                             void *_stream);

// For `set_record_stream_fn`: `Tensor.record_stream`. Without it PyTorch ignores that call, and memory is reused while
// another stream uses it.
//
// # Safety
// `stream` is a stream of the allocation's device that exists.
void vram_torch_record_stream(void *ptr,
                              void *stream);

// For `set_reset_fn`: `torch.cuda.empty_cache()`.
void vram_torch_empty_cache(void);

// For `set_memory_fraction_fn`: `torch.cuda.set_per_process_memory_fraction`.
void vram_torch_set_memory_fraction(double fraction, int ordinal);

// For `set_begin_allocate_to_pool`: a capture into the pool is about to begin. (0, 0) means no pool, and is refused. `filter`,
// a C++ object of the caller's, is not looked at.
void vram_torch_begin_allocate_to_pool(int ordinal,
                                       vram_pool_id pool,
                                       void *filter);

// For `set_end_allocate_to_pool_fn`: the capture is over.
void vram_torch_end_allocate_to_pool(int ordinal, vram_pool_id pool);

// For `set_release_pool`: a graph that used the pool is gone.
void vram_torch_release_pool(int ordinal, vram_pool_id pool);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VRAMALLOC_H */
