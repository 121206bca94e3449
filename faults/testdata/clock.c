/* A clock that a test sets: preloaded, it shifts gettimeofday, which is what Redis goes
   by, by the microseconds that stand in the file that WEIR_CLOCK names. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile const long long *shift;

__attribute__((constructor)) static void open_clock(void) {
  int file = open(getenv("WEIR_CLOCK"), O_RDONLY);
  void *page = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) abort();
  shift = page;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  long long us = ts.tv_sec * 1000000LL + ts.tv_nsec / 1000 + (shift ? *shift : 0);
  tv->tv_sec = us / 1000000;
  tv->tv_usec = us % 1000000;
  return 0;
}
