// Streams, the state of their capture, and events. Work on a stream is done when it is asked for.
#include "stub_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { kCaptureNone = 0 };
enum { kLegacyStream = 1, kPerThreadStream = 2 };

// A pool, so that any value can be told from a stream without being followed.
Stream stub_streams[kMaxStreams];
static int num_streams, num_captures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_CHILD(lock)

Stream* stub_stream(void* handle) {
  uintptr_t distance = (uintptr_t)handle - (uintptr_t)stub_streams;
  if (distance >= sizeof stub_streams || distance % sizeof(Stream) != 0) return NULL;
  Stream* stream = handle;
  return stream->id != 0 ? stream : NULL;
}

static bool is_default(void* handle) { return (uintptr_t)handle <= kPerThreadStream; }

// The context that a stream handle means; NULL if there is no such stream.
static Context* context_of(void* handle) {
  if (is_default(handle)) return stub_current;
  Stream* stream = stub_stream(handle);
  return stream != NULL ? stream->context : NULL;
}

bool stub_is_capturing(void) { return __atomic_load_n(&num_captures, __ATOMIC_ACQUIRE) > 0; }

API int stub_set_capturing(void* handle, int status) {
  pthread_mutex_lock(&lock);
  Stream* only = stub_stream(handle);
  for (int i = 0; i < num_streams; i++) {
    Stream* stream = &stub_streams[i];
    if (handle != NULL && stream != only) continue;
    int change = (status != kCaptureNone) - (stream->capture != kCaptureNone);
    __atomic_fetch_add(&num_captures, change, __ATOMIC_ACQ_REL);
    stream->capture = status;
  }
  pthread_mutex_unlock(&lock);
  return handle != NULL && only == NULL ? kInvalidHandle : kSuccess;
}

API Result cuStreamCreate(Stream** stream, unsigned flags) {
  ENTER_CONTEXT(cuStreamCreate);
  if (stream == NULL || flags > 1) return kInvalidValue;
  Result result = kOutOfMemory;
  pthread_mutex_lock(&lock);
  if (num_streams < kMaxStreams) {
    *stream = &stub_streams[num_streams++];
    **stream = (Stream){.id = num_streams, .context = stub_current};
    result = kSuccess;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

API Result cuStreamGetId(void* handle, unsigned long long* id) {
  ENTER_CONTEXT(cuStreamGetId);
  if (id == NULL) return kInvalidValue;
  if (context_of(handle) == NULL) return kInvalidHandle;
  *id = is_default(handle) ? (uintptr_t)handle : (unsigned long long)stub_stream(handle)->id + 2;
  return kSuccess;
}

API Result cuStreamSynchronize(void* handle) {
  ENTER_CONTEXT(cuStreamSynchronize);
  if (context_of(handle) == NULL) return kInvalidHandle;
  if (!is_default(handle) && stub_stream(handle)->capture != kCaptureNone)
    return kCaptureUnsupported;
  return is_default(handle) && stub_is_capturing() ? kCaptureImplicit : kSuccess;
}

API Result cuStreamIsCapturing(void* handle, int* status) {
  ENTER_CONTEXT(cuStreamIsCapturing);
  if (status == NULL) return kInvalidValue;
  *status = kCaptureNone;
  if ((uintptr_t)handle == kPerThreadStream) return kSuccess;
  if (is_default(handle)) return stub_is_capturing() ? kCaptureImplicit : kSuccess;
  Stream* stream = stub_stream(handle);
  if (stream == NULL) return kInvalidHandle;
  *status = stream->capture;
  return kSuccess;
}

// ---- events

typedef struct {
  Context* context;
  unsigned flags;
  bool recorded;
  struct timespec time;
} Event;

API Result cuEventCreate(Event** event, unsigned flags) {
  ENTER_CONTEXT(cuEventCreate);
  if (event == NULL) return kInvalidValue;
  *event = calloc(1, sizeof **event);
  (*event)->context = stub_current;
  (*event)->flags = flags;
  return kSuccess;
}

API Result cuEventDestroy_v2(Event* event) {
  ENTER(cuEventDestroy_v2);
  if (event == NULL) return kInvalidHandle;
  free(event);
  return kSuccess;
}

API Result cuEventRecord(Event* event, void* stream) {
  ENTER_CONTEXT(cuEventRecord);
  if (event == NULL || context_of(stream) != event->context) return kInvalidHandle;
  event->recorded = true;
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  return kSuccess;
}

API Result cuEventSynchronize(Event* event) {
  ENTER_CONTEXT(cuEventSynchronize);
  return event == NULL ? kInvalidHandle : kSuccess;
}

static Result elapsed(float* time_ms, const Event* start, const Event* end) {
  if (time_ms == NULL) return kInvalidValue;
  if (start == NULL || end == NULL || !start->recorded || !end->recorded) return kInvalidHandle;
  if ((start->flags | end->flags) & 2) return kInvalidHandle;  // created without timing
  *time_ms = (float)((end->time.tv_sec - start->time.tv_sec) * 1e3 +
                     (end->time.tv_nsec - start->time.tv_nsec) * 1e-6);
  return kSuccess;
}

API Result cuEventElapsedTime(float* time_ms, Event* start, Event* end) {
  ENTER_CONTEXT(cuEventElapsedTime);
  return elapsed(time_ms, start, end);
}

API Result cuEventElapsedTime_v2(float* time_ms, Event* start, Event* end) {
  ENTER_CONTEXT(cuEventElapsedTime_v2);
  return elapsed(time_ms, start, end);
}
