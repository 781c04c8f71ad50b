// Device memory, which is host memory here; it knows its context, as cuPointerGetAttribute tells.
#include "stub_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {  // CUpointer_attribute
  kPointerContext = 1,
  kPointerMemoryType = 2,
  kPointerDevice = 3,
  kPointerHost = 4,
  kPointerIsManaged = 8,
  kPointerOrdinal = 9,
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
  kPointerMapped = 13,
};
enum { kTypeDevice = 2 };
enum { kAlignment = 512 };  // a driver's allocations have 512, torch's and Triton's rely on less

typedef struct {
  uint64_t start;
  size_t size;
  Context* context;
} Allocation;

static Allocation* allocations;  // sorted by start
static int num_allocations, capacity;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static bool unified = true;

__attribute__((constructor)) static void configure(void) {
  const char* text = getenv("STUB_UNIFIED");
  if (text != NULL) unified = atoi(text) != 0;
}

// The position of the last allocation that starts at or before the address, or -1.
static int position_of(uint64_t address) {
  int low = 0, high = num_allocations;
  while (low < high) {
    int middle = (low + high) / 2;
    if (allocations[middle].start <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

static bool find(uint64_t address, Allocation* found) {
  if (__atomic_load_n(&num_allocations, __ATOMIC_ACQUIRE) == 0) return false;
  pthread_rwlock_rdlock(&lock);
  int at = position_of(address);
  bool inside = at >= 0 && address - allocations[at].start < allocations[at].size;
  if (inside) *found = allocations[at];
  pthread_rwlock_unlock(&lock);
  return inside;
}

static Result allocate(uint64_t* address, size_t size) {
  if (address == NULL || size == 0) return kInvalidValue;
  void* bytes;
  if (size > 64ull << 30 || posix_memalign(&bytes, kAlignment, size) != 0) return kOutOfMemory;
  Allocation made = {(uint64_t)bytes, size, stub_current};
  pthread_rwlock_wrlock(&lock);
  if (num_allocations == capacity) {
    capacity = capacity > 0 ? 2 * capacity : 64;
    allocations = realloc(allocations, (size_t)capacity * sizeof *allocations);
  }
  int at = position_of(made.start) + 1;
  memmove(&allocations[at + 1], &allocations[at],
          (size_t)(num_allocations - at) * sizeof *allocations);
  allocations[at] = made;
  __atomic_fetch_add(&num_allocations, 1, __ATOMIC_RELEASE);
  pthread_rwlock_unlock(&lock);
  *address = made.start;
  return kSuccess;
}

static Result release(uint64_t address) {
  if (address == 0) return kSuccess;
  pthread_rwlock_wrlock(&lock);
  int at = position_of(address);
  bool known = at >= 0 && allocations[at].start == address;
  if (known) {
    memmove(&allocations[at], &allocations[at + 1],
            (size_t)(num_allocations - at - 1) * sizeof *allocations);
    __atomic_fetch_sub(&num_allocations, 1, __ATOMIC_RELEASE);
  }
  pthread_rwlock_unlock(&lock);
  if (known) free((void*)address);
  return known ? kSuccess : kInvalidValue;
}

API Result cuMemAlloc_v2(uint64_t* address, size_t size) {
  ENTER_CONTEXT(cuMemAlloc_v2);
  return stub_is_capturing() ? kCaptureUnsupported : allocate(address, size);
}

API Result cuMemFree_v2(uint64_t address) {
  ENTER_CONTEXT(cuMemFree_v2);
  return stub_is_capturing() ? kCaptureUnsupported : release(address);
}

static Result check_stream(void* stream) {
  if ((uintptr_t)stream <= 2) return kSuccess;
  Stream* known = stub_stream(stream);
  return known != NULL && known->context == stub_current ? kSuccess : kInvalidHandle;
}

API Result cuMemAllocAsync(uint64_t* address, size_t size, void* stream) {
  ENTER_CONTEXT(cuMemAllocAsync);
  Result result = check_stream(stream);
  return result != kSuccess ? result : allocate(address, size);
}

API Result cuMemFreeAsync(uint64_t address, void* stream) {
  ENTER_CONTEXT(cuMemFreeAsync);
  Result result = check_stream(stream);
  return result != kSuccess ? result : release(address);
}

API Result cuMemAllocManaged(uint64_t* address, size_t size, unsigned flags) {
  ENTER_CONTEXT(cuMemAllocManaged);
  (void)flags;
  return allocate(address, size);
}

// ---- what a pointer is

static Result get_attribute(void* data, int attribute, uint64_t address) {
  Allocation found;
  bool known = find(address, &found);
  if (!known) {
    if (!unified) return kInvalidValue;
    Allocation any = {address, 1, stub_current};
    found = any;
  }
  switch (attribute) {
    case kPointerContext:
      *(Context**)data = found.context;
      break;
    case kPointerMemoryType:
      *(unsigned*)data = kTypeDevice;
      break;
    case kPointerDevice:
      *(uint64_t*)data = address;
      break;
    case kPointerHost:
      return kInvalidValue;  // the memory is the device's
    case kPointerIsManaged:
      *(bool*)data = false;
      break;
    case kPointerOrdinal:
      *(int*)data = found.context->device;
      break;
    case kPointerRangeStart:
      *(uint64_t*)data = found.start;
      break;
    case kPointerRangeSize:
      *(size_t*)data = found.size;
      break;
    case kPointerMapped:
      *(bool*)data = known;
      break;
    default:
      return kNotSupported;
  }
  return kSuccess;
}

API Result cuPointerGetAttribute(void* data, int attribute, uint64_t address) {
  ENTER_CONTEXT(cuPointerGetAttribute);
  if (data == NULL) return kInvalidValue;
  return get_attribute(data, attribute, address);
}

// Of an unknown pointer it says nothing, and succeeds: every answer is zero.
API Result cuPointerGetAttributes(unsigned count, const int* attributes, void** data,
                                  uint64_t address) {
  ENTER_CONTEXT(cuPointerGetAttributes);
  if (attributes == NULL || data == NULL) return kInvalidValue;
  for (unsigned i = 0; i < count; i++) {
    if (get_attribute(data[i], attributes[i], address) == kSuccess) continue;
    bool wide = attributes[i] == kPointerContext || attributes[i] == kPointerDevice ||
                attributes[i] == kPointerHost || attributes[i] == kPointerRangeStart ||
                attributes[i] == kPointerRangeSize;
    if (wide)
      *(uint64_t*)data[i] = 0;
    else if (attributes[i] == kPointerOrdinal)
      *(int*)data[i] = -2;  // as a driver marks it
    else if (attributes[i] == kPointerMemoryType)
      *(unsigned*)data[i] = 0;
    else
      *(bool*)data[i] = false;
  }
  return kSuccess;
}
