// One call on its way through the steps (see glue.h), and what all steps use.
#pragma once

#include "glue.h"

// Memory that a kernel has asked for; the call's are a list.
typedef struct Scratch {
  Handle tensor;
  struct Scratch* next;
} Scratch;

typedef struct {
  const Operator* op;
  u64* stack;
  Value* values;
  Tensor* outputs;
  i64* variables;  // sizes of named axes, -1 while unbound
  Shape* shapes;   // bound variadic axes
  i32* families;   // dtypes of families, -1 while unbound
  u64 bound;       // mask of the bound variables
  i32 device_type, device_index, dtype;
  i32 has_device, gives_out, is_coded, is_direct;
  i32 has_started;  // the kernel has
  i32 is_deep;      // a tensor has more than kMaxDims axes
  Scratch* scratch;
  char* message;
} Call;

#define FAIL(call, ...)                               \
  do {                                                \
    snprintf((call)->message, kMessage, __VA_ARGS__); \
    return 1;                                         \
  } while (0)
#define SHIM(call, expression)                                                  \
  do {                                                                          \
    if (expression) FAIL(call, "%s: %s failed", (call)->op->name, #expression); \
  } while (0)

static inline i64 min_of(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 max_of(i64 a, i64 b) { return a > b ? a : b; }

static inline i64 numel(const Tensor* t) {
  i64 count = 1;
  for (i64 d = 0; d < t->ndim; ++d) count *= t->sizes[d];
  return count;
}

static inline int is_contiguous(const Tensor* t) {
  i64 step = 1;
  for (i64 d = t->ndim - 1; d >= 0; --d) {
    if (t->sizes[d] != 1 && t->strides[d] != step) return 0;
    if (__builtin_mul_overflow(step, t->sizes[d], &step))
      return 0;  // only of a tensor without elements
  }
  return 1;
}

// Refuses written tensors whose elements share memory with each other, with another written tensor,
// or, for mutated arguments, with one that is read.
extern int opwright_check_written(Call*);
