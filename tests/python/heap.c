// How much memory a process holds through malloc, at most: preloaded into the ranks of memory_test.py.
//
// Tensors on the host, buffers of Gloo and what C++ allocates all come from malloc and its relatives, in whatever thread;
// so this counts what torch's memory profiler, which follows one thread, does not. Python's own small objects do not
// come from malloc and are left out. So are tensors of the engine of 4 MiB or more, which are mapped: memory_run.py has none.
#define _GNU_SOURCE
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_long held = 0;
static atomic_long peak = 0;

long heap_held(void) { return atomic_load(&held); }

// The most that was held since the last call, which starts anew.
long heap_peak(void) { return atomic_exchange(&peak, atomic_load(&held)); }

static void* took(void* memory) {
  if (memory == NULL) return NULL;
  const long now = atomic_fetch_add(&held, (long)malloc_usable_size(memory)) + (long)malloc_usable_size(memory);
  long most = atomic_load(&peak);
  while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
  }
  return memory;
}

static void gave(void* memory) {
  if (memory != NULL) atomic_fetch_sub(&held, (long)malloc_usable_size(memory));
}

// The names of glibc under which it offers what is replaced here.
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

void* malloc(size_t size) { return took(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return took(__libc_calloc(count, size)); }
void* memalign(size_t alignment, size_t size) { return took(__libc_memalign(alignment, size)); }
void* aligned_alloc(size_t alignment, size_t size) { return took(__libc_memalign(alignment, size)); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* memory = took(__libc_memalign(alignment, size));
  if (memory == NULL) return 12;  // ENOMEM
  *out = memory;
  return 0;
}

void* realloc(void* memory, size_t size) {
  gave(memory);
  void* moved = __libc_realloc(memory, size);
  if (moved == NULL && size != 0) return took(memory), NULL;  // the old block is still there
  return took(moved);
}

void free(void* memory) {
  gave(memory);
  __libc_free(memory);
}
