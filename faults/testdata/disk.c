/* A slow disk: preloaded, it has a sync to disk take as many seconds as WEIR_SYNC says. */
#include <stdlib.h>
#include <unistd.h>

int fdatasync(int file) {
  (void)file;
  sleep(atoi(getenv("WEIR_SYNC")));
  return 0;
}
