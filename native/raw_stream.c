/* The ceiling of `mooncake bench transfer`: what one TCP connection between two processes carries when a C
 * program does nothing but send() and recv(). "<window bytes> serve" prints its port; "<window bytes> drive
 * <port>" obeys lines
 *
 *     w <size> <count>    stream count messages to the server, which answers one byte at the end
 *     r <size> <count>    the same the other way
 *     p <size> <count>    send a message, wait for one byte, and again
 *
 * and prints the seconds it took. Both sides cycle through a window of memory as large as the one
 * the measured program cycles through, so neither works from the cache more than the other.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static size_t window_bytes;
static char* window_memory;

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static void send_all(int fd, const char* from, size_t size) {
  while (size) {
    ssize_t sent = send(fd, from, size, MSG_NOSIGNAL);
    if (sent <= 0) exit(1);
    from += sent, size -= (size_t)sent;
  }
}

static void receive_all(int fd, char* to, size_t size) {
  while (size) {
    ssize_t received = recv(fd, to, size, 0);
    if (received <= 0) exit(0);
    to += received, size -= (size_t)received;
  }
}

static void move(int fd, int sends, size_t size, size_t count) {
  size_t at = 0;
  for (size_t i = 0; i < count; i++) {
    if (at + size > window_bytes) at = 0;
    if (sends) send_all(fd, window_memory + at, size);
    else receive_all(fd, window_memory + at, size);
    at += size;
  }
}

struct order {
  char kind;
  size_t size, count;
};

static void obey(int fd, struct order order, int is_driver) {
  char byte = 0;
  if (order.kind == 'p') {
    for (size_t i = 0; i < order.count; i++) {
      move(fd, is_driver, order.size, 1);
      if (is_driver) receive_all(fd, &byte, 1);
      else send_all(fd, &byte, 1);
    }
    return;
  }
  move(fd, (order.kind == 'w') == is_driver, order.size, order.count);
  if (order.kind == 'r') return;
  if (is_driver) receive_all(fd, &byte, 1);
  else send_all(fd, &byte, 1);
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  window_bytes = strtoull(argv[1], NULL, 10);
  window_memory = mmap(NULL, window_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (window_memory == MAP_FAILED) fail("mmap");
  madvise(window_memory, window_bytes, MADV_HUGEPAGE);
  memset(window_memory, 1, window_bytes);
  int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (argc > 3) address.sin_port = htons((unsigned short)atoi(argv[3]));
  if (argc > 3 ? connect(fd, (void*)&address, length) : bind(fd, (void*)&address, length)) fail("address");
  if (argc <= 3) {
    if (listen(fd, 1) || getsockname(fd, (void*)&address, &length)) fail("listen");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    fd = accept(fd, NULL, NULL);
  }
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (argc <= 3) {
    while (1) {
      struct order order;
      receive_all(fd, (char*)&order, sizeof order);
      obey(fd, order, 0);
    }
  }
  char line[128];
  while (fgets(line, sizeof line, stdin)) {
    struct order order;
    memset(&order, 0, sizeof order);
    if (sscanf(line, "%c %zu %zu", &order.kind, &order.size, &order.count) != 3) return 1;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    send_all(fd, (const char*)&order, sizeof order);
    obey(fd, order, 1);
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%.9f\n", (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec));
    fflush(stdout);
  }
  return 0;
}
