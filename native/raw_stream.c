/* The ceiling of `mooncake bench transfer`: what TCP connections between two processes carry when a C program
 * does nothing but send() and recv(). "<window bytes> <streams> <buffer bytes> serve" prints its port; "<window
 * bytes> <streams> <buffer bytes> drive <port>" obeys lines
 *
 *     w <size> <count> <lanes>    stream count messages to the server, which answers one byte at the end
 *     r <size> <count> <lanes>    the same the other way
 *     p <size> <count> <lanes>    send a message, wait for one byte, and again
 *
 * and prints the seconds it took. `lanes` of the streams are used at the same time, each by a thread of its own
 * at both ends; they share the messages, or each message when they are too few. The sockets' send buffers are of
 * the given size; 0 leaves the kernel's choice. Both sides cycle through a window of memory as large as the one
 * the measured program cycles through, so neither works from the cache more than the other.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_STREAMS 64

static size_t share_bytes; /* of the window, for each stream */
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

struct order {
  char kind;
  size_t size, count;
};

/* One connection; on the driver's side with its part of an order. */
struct stream {
  int fd;
  char* memory;
  struct order order;
  pthread_t thread;
};

static struct stream streams[MOST_STREAMS];

static void move(const struct stream* stream, int sends, size_t size, size_t count) {
  size_t at = 0;
  for (size_t i = 0; i < count; i++) {
    if (at + size > share_bytes) at = 0;
    if (sends) send_all(stream->fd, stream->memory + at, size);
    else receive_all(stream->fd, stream->memory + at, size);
    at += size;
  }
}

static void obey(const struct stream* stream, struct order order, int is_driver) {
  int fd = stream->fd;
  char byte = 0;
  if (order.kind == 'p') {
    for (size_t i = 0; i < order.count; i++) {
      move(stream, is_driver, order.size, 1);
      if (is_driver) receive_all(fd, &byte, 1);
      else send_all(fd, &byte, 1);
    }
    return;
  }
  move(stream, (order.kind == 'w') == is_driver, order.size, order.count);
  if (order.kind == 'r') return;
  if (is_driver) receive_all(fd, &byte, 1);
  else send_all(fd, &byte, 1);
}

static void* serve(void* argument) {
  struct stream* stream = argument;
  while (1) {
    struct order order;
    receive_all(stream->fd, (char*)&order, sizeof order);
    obey(stream, order, 0);
  }
  return NULL;
}

static void* drive(void* argument) {
  struct stream* stream = argument;
  send_all(stream->fd, (const char*)&stream->order, sizeof stream->order);
  obey(stream, stream->order, 1);
  return NULL;
}

/* Lane i's part of an order. */
static struct order part_of(struct order whole, size_t lanes, size_t i) {
  struct order part = whole;
  if (whole.count >= lanes && whole.size <= share_bytes) part.count = whole.count / lanes + (i < whole.count % lanes);
  else part.size = whole.size / lanes + (i < whole.size % lanes);
  return part;
}

static int opened(size_t buffer_bytes, const struct sockaddr_in* address) {
  int fd = socket(AF_INET, SOCK_STREAM, 0), size = (int)buffer_bytes, one = 1;
  if (fd < 0) fail("socket");
  if (size) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size); /* those accepted inherit it */
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  int is_driver = address->sin_port != 0;
  if (is_driver ? connect(fd, (void*)address, sizeof *address) : bind(fd, (void*)address, sizeof *address))
    fail("address");
  return fd;
}

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  size_t window_bytes = strtoull(argv[1], NULL, 10), num_streams = strtoull(argv[2], NULL, 10);
  size_t buffer_bytes = strtoull(argv[3], NULL, 10);
  if (num_streams < 1 || num_streams > MOST_STREAMS) return 2;
  share_bytes = window_bytes / num_streams;
  window_memory = mmap(NULL, window_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (window_memory == MAP_FAILED) fail("mmap");
  madvise(window_memory, window_bytes, MADV_HUGEPAGE);
  memset(window_memory, 1, window_bytes);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int is_driver = argc > 5, listening = -1, one = 1;
  if (is_driver) {
    address.sin_port = htons((unsigned short)atoi(argv[5]));
  } else {
    listening = opened(buffer_bytes, &address);
    if (listen(listening, MOST_STREAMS) || getsockname(listening, (void*)&address, &length)) fail("listen");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
  }
  for (size_t i = 0; i < num_streams; i++) {
    struct stream* stream = &streams[i];
    stream->memory = window_memory + i * share_bytes;
    stream->fd = is_driver ? opened(buffer_bytes, &address) : accept(listening, NULL, NULL);
    if (stream->fd < 0) fail("accept");
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!is_driver && i + 1 < num_streams && pthread_create(&stream->thread, NULL, serve, stream)) fail("thread");
  }
  if (!is_driver) serve(&streams[num_streams - 1]);
  char line[128];
  while (fgets(line, sizeof line, stdin)) {
    struct order order;
    size_t lanes;
    memset(&order, 0, sizeof order);
    if (sscanf(line, "%c %zu %zu %zu", &order.kind, &order.size, &order.count, &lanes) != 4) return 1;
    if (lanes < 1 || lanes > num_streams || order.size > window_bytes) return 1;
    if (lanes > 1 && (order.size + lanes - 1) / lanes > share_bytes) return 1;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (size_t i = 0; i < lanes; i++) streams[i].order = part_of(order, lanes, i);
    for (size_t i = 1; i < lanes; i++)
      if (pthread_create(&streams[i].thread, NULL, drive, &streams[i])) fail("thread");
    drive(&streams[0]);
    for (size_t i = 1; i < lanes; i++) pthread_join(streams[i].thread, NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%.9f\n", (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec));
    fflush(stdout);
  }
  return 0;
}
