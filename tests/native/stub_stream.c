// Streams, their capture, and events. Work on a stream is done when it is asked for.
#include "stub_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { kCaptureNone = 0, kCaptureActive = 1 };
enum { kModeGlobal = 0, kModeThreadLocal = 1, kModeRelaxed = 2 };
enum { kLegacyStream = 1, kPerThreadStream = 2 };

// A pool, so that any value can be told from a stream without being followed.
Stream stub_streams[kMaxStreams];
int stub_global_captures;
static int num_streams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_CHILD(lock)

Stream* stub_stream(void* handle) {
  uintptr_t distance = (uintptr_t)handle - (uintptr_t)stub_streams;
  if (distance >= sizeof stub_streams || distance % sizeof(Stream) != 0) return NULL;
  Stream* stream = handle;
  return stream->used ? stream : NULL;
}

static bool is_default(void* handle) { return (uintptr_t)handle <= kPerThreadStream; }

// The context that a stream handle means; NULL if there is no such stream.
static Context* context_of(void* handle) {
  if (is_default(handle)) return stub_current;
  Stream* stream = stub_stream(handle);
  return stream != NULL ? stream->context : NULL;
}

bool stub_is_capturing(void) {
  Thread* self = stub_self();
  if (self->capture_mode == kModeRelaxed) return false;
  return __atomic_load_n(&stub_global_captures, __ATOMIC_ACQUIRE) > 0 || self->local_captures > 0;
}

static void set_capture(Stream* stream, int status, int mode) {
  int change = (status != kCaptureNone) - (stream->capture != kCaptureNone);
  if (change > 0) stream->capture_mode = mode;
  if (stream->capture_mode == kModeGlobal)
    __atomic_fetch_add(&stub_global_captures, change, __ATOMIC_ACQ_REL);
  if (stream->capture_mode == kModeThreadLocal) stub_self()->local_captures += change;
  stream->capture = status;
}

API int stub_set_capturing(void* handle, int status) {
  pthread_mutex_lock(&lock);
  Stream* only = stub_stream(handle);
  for (int i = 0; i < num_streams; i++)
    if (stub_streams[i].used && (handle == NULL || &stub_streams[i] == only))
      set_capture(&stub_streams[i], status, kModeGlobal);
  pthread_mutex_unlock(&lock);
  return handle != NULL && only == NULL ? kInvalidHandle : kSuccess;
}

static Result create(Stream** stream, unsigned flags, int priority) {
  if (stream == NULL || flags > 1) return kInvalidValue;
  Result result = kOutOfMemory;
  pthread_mutex_lock(&lock);
  if (num_streams < kMaxStreams) {
    Stream made = {.used = true,
                   .id = num_streams + 1,
                   .context = stub_current,
                   .flags = flags,
                   .priority = priority};
    stub_streams[num_streams] = made;
    *stream = &stub_streams[num_streams++];
    result = kSuccess;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

API Result cuStreamCreate(Stream** stream, unsigned flags) {
  ENTER_CONTEXT(cuStreamCreate);
  return create(stream, flags, 0);
}

API Result cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
  ENTER_CONTEXT(cuStreamCreateWithPriority);
  return create(stream, flags, priority);
}

API Result cuStreamDestroy_v2(void* handle) {
  ENTER(cuStreamDestroy_v2);
  Stream* stream = stub_stream(handle);
  if (stream == NULL) return kInvalidHandle;
  pthread_mutex_lock(&lock);
  set_capture(stream, kCaptureNone, kModeGlobal);
  stream->used = false;
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

API Result cuStreamGetCtx(void* handle, Context** context) {
  ENTER_CONTEXT(cuStreamGetCtx);
  if (context == NULL) return kInvalidValue;
  Stream* stream = stub_stream(handle);
  if (stream != NULL && stream->capture != kCaptureNone) return kCaptureUnsupported;
  Context* found = context_of(handle);
  if (found == NULL) return kInvalidHandle;
  *context = found;
  return kSuccess;
}

API Result cuStreamGetFlags(void* handle, unsigned* flags) {
  ENTER_CONTEXT(cuStreamGetFlags);
  if (flags == NULL) return kInvalidValue;
  if (context_of(handle) == NULL) return kInvalidHandle;
  *flags = is_default(handle) ? 0 : stub_stream(handle)->flags;
  return kSuccess;
}

API Result cuStreamGetId(void* handle, unsigned long long* id) {
  ENTER_CONTEXT(cuStreamGetId);
  if (id == NULL) return kInvalidValue;
  if (context_of(handle) == NULL) return kInvalidHandle;
  *id = is_default(handle) ? (uintptr_t)handle : (unsigned long long)stub_stream(handle)->id + 2;
  return kSuccess;
}

API Result cuStreamGetPriority(void* handle, int* priority) {
  ENTER_CONTEXT(cuStreamGetPriority);
  if (priority == NULL) return kInvalidValue;
  if (context_of(handle) == NULL) return kInvalidHandle;
  *priority = is_default(handle) ? 0 : stub_stream(handle)->priority;
  return kSuccess;
}

static Result wait_for(void* handle) {
  if (context_of(handle) == NULL) return kInvalidHandle;
  if (!is_default(handle) && stub_stream(handle)->capture != kCaptureNone)
    return kCaptureUnsupported;
  return is_default(handle) && stub_is_capturing() ? kCaptureImplicit : kSuccess;
}

API Result cuStreamQuery(void* handle) {
  ENTER_CONTEXT(cuStreamQuery);
  return wait_for(handle);
}

API Result cuStreamSynchronize(void* handle) {
  ENTER_CONTEXT(cuStreamSynchronize);
  return wait_for(handle);
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

API Result cuStreamBeginCapture_v2(void* handle, int mode) {
  ENTER_CONTEXT(cuStreamBeginCapture_v2);
  if (mode < kModeGlobal || mode > kModeRelaxed) return kInvalidValue;
  Stream* stream = stub_stream(handle);
  if (stream == NULL) return is_default(handle) ? kCaptureUnsupported : kInvalidHandle;
  if (stream->capture != kCaptureNone) return kIllegalState;
  pthread_mutex_lock(&lock);
  set_capture(stream, kCaptureActive, mode);
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

API Result cuStreamEndCapture(void* handle, void** graph) {
  ENTER_CONTEXT(cuStreamEndCapture);
  Stream* stream = stub_stream(handle);
  if (stream == NULL) return kInvalidHandle;
  if (stream->capture == kCaptureNone || graph == NULL) return kIllegalState;
  pthread_mutex_lock(&lock);
  set_capture(stream, kCaptureNone, kModeGlobal);
  pthread_mutex_unlock(&lock);
  *graph = malloc(1);
  return kSuccess;
}

API Result cuGraphDestroy(void* graph) {
  ENTER(cuGraphDestroy);
  free(graph);
  return kSuccess;
}

API Result cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  if (mode == NULL || *mode < kModeGlobal || *mode > kModeRelaxed) return kInvalidValue;
  Thread* self = stub_self();
  int before = self->capture_mode;
  self->capture_mode = *mode;
  *mode = before;
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

static Result record_event(Event* event, void* stream) {
  if (event == NULL || context_of(stream) != event->context) return kInvalidHandle;
  event->recorded = true;
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  return kSuccess;
}

API Result cuEventRecord(Event* event, void* stream) {
  ENTER_CONTEXT(cuEventRecord);
  return record_event(event, stream);
}

API Result cuEventRecordWithFlags(Event* event, void* stream, unsigned flags) {
  ENTER_CONTEXT(cuEventRecordWithFlags);
  (void)flags;
  return record_event(event, stream);
}

API Result cuStreamWaitEvent(void* stream, Event* event, unsigned flags) {
  ENTER_CONTEXT(cuStreamWaitEvent);
  (void)flags;
  return event == NULL || context_of(stream) == NULL ? kInvalidHandle : kSuccess;
}

API Result cuEventQuery(Event* event) {
  ENTER_CONTEXT(cuEventQuery);
  return event == NULL ? kInvalidHandle : kSuccess;
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
