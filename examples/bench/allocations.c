// What torch's CPU allocator holds, summed over all threads and processes that write to one file: to be preloaded
// (LD_PRELOAD). torch takes its memory by posix_memalign and gives it back by free. Nothing of the package is in here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLOTS 4096         // processes that ever write to the file
#define ENTRIES (1 << 20)  // blocks that are alive in one process
#define SMALLEST 512       // bytes; smaller blocks are not counted

struct slot { int64_t pid, live; };
struct board { int64_t live, peak; struct slot slots[SLOTS]; };
static struct board *board;
static int64_t *mine;
static struct { uintptr_t address; size_t size; } table[ENTRIES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static void claim_slot(void) {
  mine = NULL;
  if (!board) return;
  for (int i = 0; i < SLOTS; i++) {
    int64_t empty = 0;
    if (__atomic_compare_exchange_n(&board->slots[i].pid, &empty, (int64_t)getpid(), 0, 5, 5)) {
      mine = &board->slots[i].live;
      return;
    }
  }
}

static void after_fork(void) {  // what a child inherits is its parent's
  pthread_mutex_init(&lock, NULL);
  for (long i = 0; i < ENTRIES; i++) table[i].address = 0;
  claim_slot();
}

__attribute__((constructor)) static void begin(void) {
  real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  real_free = dlsym(RTLD_NEXT, "free");
  const char *path = getenv("ALLOCATIONS_FILE");
  int file = path ? open(path, O_RDWR) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return;
  board = mapped;
  claim_slot();
  pthread_atfork(NULL, NULL, after_fork);
}

static void count(int64_t size) {
  __atomic_add_fetch(mine, size, 5);
  int64_t live = __atomic_add_fetch(&board->live, size, 5), peak = __atomic_load_n(&board->peak, 5);
  while (live > peak && !__atomic_compare_exchange_n(&board->peak, &peak, live, 0, 5, 5)) {}
}

static size_t place(uintptr_t address) { return (address >> 6) * 0x9E3779B97F4A7C15ull >> 44; }

int posix_memalign(void **result, size_t alignment, size_t size) {
  if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  int failed = real_memalign(result, alignment, size);
  if (failed || !mine || size < SMALLEST) return failed;
  pthread_mutex_lock(&lock);
  size_t i = place((uintptr_t)*result);
  while (table[i].address) i = (i + 1) % ENTRIES;
  table[i].address = (uintptr_t)*result;
  table[i].size = size;
  pthread_mutex_unlock(&lock);
  count((int64_t)size);
  return 0;
}

void free(void *block) {
  if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
  if (block && mine && malloc_usable_size(block) >= SMALLEST) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    size_t i = place((uintptr_t)block);
    while (table[i].address && table[i].address != (uintptr_t)block) i = (i + 1) % ENTRIES;
    if (table[i].address) {
      size = table[i].size;
      // Close the gap, so that what stands behind it is still found.
      for (size_t hole = i, j = (i + 1) % ENTRIES;; j = (j + 1) % ENTRIES) {
        if (!table[j].address) { table[hole].address = 0; break; }
        size_t home = place(table[j].address);
        if ((j > hole && (home <= hole || home > j)) || (j < hole && home <= hole && home > j)) {
          table[hole] = table[j];
          hole = j;
        }
      }
    }
    pthread_mutex_unlock(&lock);
    if (size) count(-(int64_t)size);
  }
  real_free(block);
}
