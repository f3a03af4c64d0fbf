// SPDX-License-Identifier: Apache-2.0
/* A client of Redis in C, which bench/store.py compiles: what Redis does when its client costs almost nothing.
 * "<port> <window bytes>" obeys lines
 *
 *     put <size> <count> <times>    SET of count keys in one pipeline, and again so many times
 *     get <size> <count> <times>    GET of the same keys
 *
 * and prints the seconds of one pipeline. One connection of loopback without Nagle's algorithm; a pipeline is
 * sent without copying its values, and values are received where they belong, in a window of memory that is
 * walked through, so that neither comes from the processor's cache.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define MOST_KEYS 1024
#define KEY_BYTES 32

static int fd;
static size_t window_bytes, source_at, target_at;
static char *source, *target;
static char buffer[16 << 10];
static size_t buffered, used;

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static void send_all(struct iovec* parts, size_t count) {
  while (count) {
    ssize_t sent = writev(fd, parts, (int)(count < 512 ? count : 512));
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) fail("send");
    size_t left = (size_t)sent;
    while (count && left >= parts->iov_len) left -= parts->iov_len, parts++, count--;
    if (count) parts->iov_base = (char*)parts->iov_base + left, parts->iov_len -= left;
  }
}

static void fill_buffer(void) {
  ssize_t received = recv(fd, buffer, sizeof buffer, 0);
  if (received <= 0) fail("receive");
  buffered = (size_t)received, used = 0;
}

static void receive_all(char* to, size_t size) {
  while (size) {
    size_t here = buffered - used;
    if (here) {
      here = here < size ? here : size;
      memcpy(to, buffer + used, here);
      used += here, to += here, size -= here;
    } else if (size < sizeof buffer) {
      fill_buffer();
    } else {
      ssize_t received = recv(fd, to, size, 0);
      if (received <= 0) fail("receive");
      to += received, size -= (size_t)received;
    }
  }
}

static void receive_line(char* line, size_t size) {
  size_t length = 0;
  do {
    if (used == buffered) fill_buffer();
    if (length == size - 1) exit(1);
    line[length++] = buffer[used++];
  } while (line[length - 1] != '\n');
  line[length] = 0;
}

static char* next_of(char* window, size_t* at, size_t size) {
  if (*at + size > window_bytes) *at = 0;
  *at += size;
  return window + *at - size;
}

static void put(size_t size, size_t count) {
  static struct iovec parts[2 * MOST_KEYS + 1];
  static char heads[MOST_KEYS + 1][KEY_BYTES + 64];
  for (size_t i = 0; i < count; i++) {
    char key[KEY_BYTES];
    int key_bytes = snprintf(key, sizeof key, "key%zu", i);
    int head_bytes = snprintf(heads[i], sizeof heads[i], "%s*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%zu\r\n", i ? "\r\n" : "",
                              key_bytes, key, size);
    parts[2 * i] = (struct iovec){heads[i], (size_t)head_bytes};
    parts[2 * i + 1] = (struct iovec){next_of(source, &source_at, size), size};
  }
  parts[2 * count] = (struct iovec){"\r\n", 2};
  send_all(parts, 2 * count + 1);
  for (size_t i = 0; i < count; i++) {
    char line[64];
    receive_line(line, sizeof line);
    if (strcmp(line, "+OK\r\n") != 0) fprintf(stderr, "SET: %s", line), exit(1);
  }
}

static void get(size_t size, size_t count) {
  static char commands[MOST_KEYS * (KEY_BYTES + 64)];
  size_t length = 0;
  for (size_t i = 0; i < count; i++) {
    char key[KEY_BYTES];
    int key_bytes = snprintf(key, sizeof key, "key%zu", i);
    length += (size_t)snprintf(commands + length, sizeof commands - length, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n",
                               key_bytes, key);
  }
  struct iovec all = {commands, length};
  send_all(&all, 1);
  for (size_t i = 0; i < count; i++) {
    char line[64], end[2];
    receive_line(line, sizeof line);
    if (line[0] != '$' || strtoull(line + 1, NULL, 10) != size) fprintf(stderr, "GET: %s", line), exit(1);
    receive_all(next_of(target, &target_at, size), size);
    receive_all(end, 2);
  }
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  window_bytes = strtoull(argv[2], NULL, 10);
  source = mmap(NULL, window_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  target = mmap(NULL, window_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (source == MAP_FAILED || target == MAP_FAILED) fail("mmap");
  for (size_t i = 0; i < window_bytes; i++) source[i] = (char)(i * 2654435761u >> 13);
  memset(target, 1, window_bytes);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  address.sin_port = htons((unsigned short)atoi(argv[1]));
  int one = 1;
  fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, (void*)&address, sizeof address)) fail("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  printf("ready\n");
  fflush(stdout);
  char line[128], what[16];
  while (fgets(line, sizeof line, stdin)) {
    size_t size, count, times;
    if (sscanf(line, "%15s %zu %zu %zu", what, &size, &count, &times) != 4) return 2;
    if (count > MOST_KEYS || size > window_bytes || !times) return 2;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (size_t i = 0; i < times; i++) {
      if (strcmp(what, "put") == 0) put(size, count);
      else get(size, count);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    printf("%.9f\n", seconds / (double)times);
    fflush(stdout);
  }
  return 0;
}
