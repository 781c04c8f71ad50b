// The recorder, the counters, and failures on demand.
#include "stub_driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool stub_slow_launch;
bool stub_has_faults;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_CHILD(lock)
static Thread* threads;
static int record_file = -1;

// ---- counters

Thread* stub_new_thread(void) {
  Thread* made = aligned_alloc(_Alignof(Thread), sizeof *made);
  memset(made, 0, sizeof *made);
  pthread_mutex_lock(&lock);
  made->next = threads;
  threads = made;
  pthread_mutex_unlock(&lock);
  stub_thread = made;
  return made;
}

static int find_function(const char* name) {
  for (int i = 0; name != NULL && i < kFunctions; i++)
    if (strcmp(kFunctionNames[i], name) == 0) return i;
  return -1;
}

static uint64_t total(int id) {
  uint64_t sum = 0;
  for (Thread* thread = threads; thread != NULL; thread = thread->next)
    sum += __atomic_load_n(&thread->counts[id], __ATOMIC_RELAXED);
  return sum;
}

API int64_t stub_count(const char* name) {
  int id = find_function(name);
  if (id < 0) return -1;
  pthread_mutex_lock(&lock);
  uint64_t sum = total(id);
  pthread_mutex_unlock(&lock);
  return (int64_t)sum;
}

__attribute__((destructor)) static void write_counts(void) {
  const char* path = getenv("STUB_COUNTS");
  FILE* file = path != NULL ? fopen(path, "w") : NULL;
  if (file == NULL) return;
  const char* separator = "{";
  for (int i = 0; i < kFunctions; i++) {
    uint64_t count = total(i);
    if (count == 0) continue;
    fprintf(file, "%s\"%s\": %llu", separator, kFunctionNames[i], (unsigned long long)count);
    separator = ", ";
  }
  fputs(*separator == '{' ? "{}\n" : "}\n", file);
  fclose(file);
}

// ---- failures

enum { kMaxFaults = 32 };
typedef struct {
  int id;
  int64_t nth;  // 0: every call
  int64_t seen;
  Result error;
} Fault;
static Fault faults[kMaxFaults];
static int num_faults;

API int stub_fail(const char* name, int nth, int error) {
  int id = find_function(name);
  if (name != NULL && id < 0) return -1;
  Result result = 0;
  pthread_mutex_lock(&lock);
  if (name == NULL) {
    num_faults = 0;
  } else if (num_faults == kMaxFaults) {
    result = -1;
  } else {
    Fault fault = {id, nth, 0, error};
    faults[num_faults++] = fault;
  }
  __atomic_store_n(&stub_has_faults, num_faults > 0, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return result;
}

Result stub_injected(FunctionId id) {
  Result result = kSuccess;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_faults; i++) {
    if (faults[i].id != (int)id) continue;
    faults[i].seen++;
    if (faults[i].nth == 0 || faults[i].seen == faults[i].nth) result = faults[i].error;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static void read_faults(const char* text) {
  char name[64];
  int nth, error, length;
  while (sscanf(text, " %63[^:]:%d:%d%n", name, &nth, &error, &length) == 3) {
    if (stub_fail(name, nth, error) != 0) {
      fprintf(stderr, "stub driver: STUB_FAIL: no entry point %s\n", name);
      abort();
    }
    text += length;
    if (*text == ',') text++;
  }
  if (*text != 0) {
    fprintf(stderr, "stub driver: STUB_FAIL: not function:nth:error: %s\n", text);
    abort();
  }
}

// ---- recorder

API int stub_record(const char* path) {
  int file = -1;
  if (path != NULL && (file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) < 0)
    return -1;
  pthread_mutex_lock(&lock);
  if (record_file >= 0) close(record_file);
  record_file = file;
  __atomic_store_n(&stub_slow_launch, file >= 0, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return 0;
}

__attribute__((constructor)) static void configure(void) {
  const char* text = getenv("STUB_RECORD");
  if (text != NULL && *text != 0 && stub_record(text) != 0) perror("stub driver: STUB_RECORD");
  text = getenv("STUB_FAIL");
  if (text != NULL) read_faults(text);
}

typedef struct {
  char* bytes;
  size_t size, capacity;
} Text;

static void add(Text* text, const char* format, ...) __attribute__((format(printf, 2, 3)));
static void add(Text* text, const char* format, ...) {
  if (text->capacity - text->size < 512) {
    text->capacity = 2 * text->capacity + 1024;
    text->bytes = realloc(text->bytes, text->capacity);
  }
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(text->bytes + text->size, text->capacity - text->size, format, arguments);
  va_end(arguments);
  size_t room = text->capacity - text->size - 1;
  text->size += (size_t)length < room ? (size_t)length : room;
}

static void add_hex(Text* text, const unsigned char* bytes, size_t size) {
  for (size_t i = 0; i < size; i++) add(text, "%02x", bytes[i]);
}

static void add_three(Text* text, const char* name, const unsigned* three) {
  add(text, "\"%s\": [%u, %u, %u], ", name, three[0], three[1], three[2]);
}

static const char* attribute_name(int id) {
  static const char* const kNames[] = {"ignore",
                                       "access_policy_window",
                                       "cooperative",
                                       "synchronization_policy",
                                       "cluster_dimension",
                                       "cluster_scheduling_policy_preference",
                                       "programmatic_stream_serialization",
                                       "programmatic_event",
                                       "priority",
                                       "mem_sync_domain_map",
                                       "mem_sync_domain",
                                       "preferred_cluster_dimension",
                                       "launch_completion_event",
                                       "device_updatable_kernel_node",
                                       "preferred_shared_memory_carveout",
                                       "portable_cluster_size_mode",
                                       "nvlink_util_centric_scheduling",
                                       "unknown",
                                       "shared_memory_mode"};
  return id >= 0 && id < (int)(sizeof kNames / sizeof *kNames) ? kNames[id] : "unknown";
}

static void add_attributes(Text* text, const LaunchConfig* config) {
  add(text, "\"attributes\": [");
  for (unsigned i = 0; i < config->num_attributes; i++) {
    const LaunchAttribute* attribute = &config->attributes[i];
    add(text, "%s{\"id\": %d, \"name\": \"%s\", \"value\": ", i > 0 ? ", " : "", attribute->id,
        attribute_name(attribute->id));
    if (attribute->id == 4 || attribute->id == 11)
      add(text, "[%u, %u, %u]}", attribute->dim[0], attribute->dim[1], attribute->dim[2]);
    else
      add(text, "%d}", attribute->number);
  }
  add(text, "], ");
}

static void add_params(Text* text, const Entry* entry, void** params, const unsigned char* buffer,
                       size_t buffer_size) {
  add(text, "\"params\": [");
  for (int i = 0; i < entry->num_params; i++) {
    Param param = entry->params[i];
    add(text, "%s{\"offset\": %u, \"size\": %u, \"hex\": \"", i > 0 ? ", " : "", param.offset,
        param.size);
    if (params != NULL)
      add_hex(text, params[i], param.size);
    else if (buffer != NULL && param.offset + param.size <= buffer_size)
      add_hex(text, buffer + param.offset, param.size);
    add(text, "\"}");
  }
  add(text, "]}\n");
}

void stub_record_launch(const Function* function, const LaunchConfig* config, void** params,
                        const void* buffer, size_t buffer_size, const char* call) {
  Text text = {0};
  add(&text, "{\"kernel\": \"%.200s\", \"call\": \"%s\", \"form\": \"%s\", ", function->entry->name,
      call, params != NULL || buffer == NULL ? "pointers" : "packed");
  add(&text, "\"device\": %d, \"context\": %d, ", function->context->device, function->context->id);
  add_three(&text, "grid", config->grid);
  add_three(&text, "block", config->block);
  const Stream* stream = stub_stream(config->stream);
  add(&text, "\"shared\": %u, \"stream\": %llu, ", config->shared,
      stream != NULL ? (unsigned long long)stream->id + 2
                     : (unsigned long long)(uintptr_t)config->stream);
  add_attributes(&text, config);
  add(&text, "\"image\": \"%016llx\", ", (unsigned long long)function->image->digest);
  add_params(&text, function->entry, params, buffer, buffer_size);
  pthread_mutex_lock(&lock);
  // One write of a file opened for appending: whole lines, from several processes too.
  if (record_file >= 0 && write(record_file, text.bytes, text.size) != (ssize_t)text.size)
    perror("stub driver: record");
  pthread_mutex_unlock(&lock);
  free(text.bytes);
}
