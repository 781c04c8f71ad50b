// Calls from Python that bypass the dispatcher: on plain tensors, without a gradient, where no
// mode, transform, autocast or profiler is active. All others are left to the dispatcher, see
// `leave`.
//
// A tensor's handle is the address of the pointer to its implementation, which lies in the Python
// object. dispatch/direct.py finds out where, and passes it with the functions of Python and
// PyTorch in a table. So no header is needed, and a program without Python can load this library.
#include "glue.h"

enum { kPlainTypes = 2, kInferenceModes = 2, kDevices = 2 };

typedef struct PyObject PyObject;

// `Python` of dispatch/direct.py.
typedef struct {
  i64 type_at, implementation_at;  // in a Python object, in bytes
  i64 keys_at;                     // in the implementation: the dispatcher's keys of a tensor
  u64 tensor_types[kPlainTypes];
  u64 states[kInferenceModes][2];       // `local_keys` of a plain thread
  u64 ignored;                          // keys that a thread may exclude: no plain tensor has them
  u64 keys[kDevices][kInferenceModes];  // of a plain tensor, by type of device
  u64 int_type, float_type, true_value, false_value;
  PyObject* none;
  void* runtime_error;
  void* pytorch;                                          // through which all its symbols are found
  void* (*find_symbol)(void* library, const char* name);  // of a thread-local one, this thread's
  _Bool (*is_grad_enabled)(void);
  _Bool (*has_callbacks)(void);  // a profiler's
  i64 (*count_function_modes)(void);
  _Bool (*requires_grad)(const void* implementation);
  PyObject* (*wrap)(Handle);       // a new Python object for a tensor
  void* (*as_pointer)(PyObject*);  // of an int
  i64 (*as_int)(PyObject*);
  double (*as_float)(PyObject*);
  PyObject* (*error_occurred)(void);
  void (*clear_error)(void);
  void (*set_error)(void* type, const char* message);
  void (*increase)(PyObject*);
  void (*decrease)(PyObject*);
  PyObject* (*new_tuple)(i64 size);
  int (*set_item)(PyObject* tuple, i64 index, PyObject* item);
  void* (*release_lock)(void);
  void (*take_lock)(void*);
} Python;

static const Python* python;

__attribute__((visibility("default"))) void opwright_use_python(const Python* found) {
  python = found;
}

// The dispatch keys that this thread includes and excludes, XORed with PyTorch's defaults. Both
// words are zero where no mode, transform or autocast is active, outside of inference mode.
static const u64* local_keys(void) {
  static __thread const u64* found;
  if (!found)
    found = python->find_symbol(python->pytorch, "_ZN3c104impl26raw_local_dispatch_key_setE");
  return found;
}

static u64 word_at(const void* start, i64 offset) {
  return *(const u64*)((const char*)start + offset);
}

static int is_tensor(const PyObject* value) {
  const u64 type = word_at(value, python->type_at);
  return type == python->tensor_types[0] || type == python->tensor_types[1];
}

static const void* implementation(const PyObject* tensor) {
  return (const void*)word_at(tensor, python->implementation_at);
}

// Returns the type of device of a plain tensor, -1 of another one: sparse, nested, negated, ...
static i32 device_of(const PyObject* tensor) {
  const u64 keys = word_at(implementation(tensor), python->keys_at);
  for (i32 device = 0; device < kDevices; ++device) {
    if (keys && (keys == python->keys[device][0] || keys == python->keys[device][1])) return device;
  }
  return -1;
}

static int is_watched(void) {
  const u64* keys = local_keys();
  int is_plain = 0;
  for (i32 i = 0; i < kInferenceModes; ++i) {
    const u64* state = python->states[i];
    is_plain |= keys[0] == state[0] && (keys[1] & ~python->ignored) == state[1];
  }
  return !is_plain || python->count_function_modes() || python->has_callbacks();
}

// Puts an argument on the stack as the dispatcher would, but without a reference of its own;
// returns 0 where it has to be left to the dispatcher.
static int put(const Argument* argument, PyObject* value, i32 device, int records, u64* word) {
  const u64 type = word_at(value, python->type_at);
  double real;
  switch (argument->kind) {
    case kTensor:
      *word = 0;
      if (value == python->none) return argument->optional;
      if (!is_tensor(value) || device_of(value) != device) return 0;
      *word = (u64)value + (u64)python->implementation_at;
      return !records || !python->requires_grad(implementation(value));
    case kInt:
    case kChoice:
      if (type != python->int_type) return 0;
      *word = (u64)python->as_int(value);
      break;
    case kFloat:
      if (type != python->float_type && type != python->int_type) return 0;
      real = python->as_float(value);
      __builtin_memcpy(word, &real, sizeof real);
      break;
    case kBool:
      *word = (u64)value == python->true_value;
      return *word || (u64)value == python->false_value;
    case kTensorList:
      return 0;
  }
  if (*word != ~0ULL && *word != 0xBFF0000000000000) return 1;  // -1 may stand for an error
  if (!python->error_occurred()) return 1;
  python->clear_error();
  return 0;
}

// Replaces the handles of tensors by references of its own, in `held`; returns how many those are.
// While the lock is released, another thread may give a Python object another implementation
// (torch.utils.swap_tensors).
static i32 hold(const Operator* op, u64* stack, Handle* held) {
  i32 count = 0;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    if (op->arguments[i].kind != kTensor || !stack[i]) continue;
    if (aoti_torch_new_tensor_handle((Handle)stack[i], &held[count])) break;
    stack[i] = (u64)held[count++];
  }
  return count;
}

// Leaves a call to the dispatcher: False where something may want to see it or to change it, None
// where nothing does.
static PyObject* leave(int watched) {
  PyObject* result = watched ? (PyObject*)python->false_value : python->none;
  python->increase(result);
  return result;
}

// Returns the tensor, or a tuple of several.
static PyObject* take_results(const u64* handles, i32 count) {
  PyObject* tuple = count == 1 ? 0 : python->new_tuple(count);
  PyObject* made = 0;
  i32 failed = count != 1 && !tuple;
  for (i32 i = 0; i < count; ++i) {
    made = failed ? 0 : python->wrap((Handle)handles[i]);
    aoti_torch_delete_tensor_object((Handle)handles[i]);
    failed |= !made;
    if (made && count != 1) python->set_item(tuple, i, made);
  }
  if (count == 1) return made;
  if (failed && tuple) python->decrease(tuple);
  return failed ? 0 : tuple;
}

// The C function that Python calls (METH_FASTCALL). `self` is a Python int: the address of an array
// with one Slot pointer per device type, null where the operator has no kernel.
__attribute__((visibility("default"))) PyObject* opwright_call_directly(PyObject* self,
                                                                        PyObject* const* values,
                                                                        i64 count) {
  const Slot* const* slots = python->as_pointer(self);
  i32 device = -1;
  if (is_watched()) return leave(1);
  for (i64 i = 0; i < count && device < 0; ++i) {
    if (is_tensor(values[i]) && (device = device_of(values[i])) < 0) return leave(0);
  }
  const Slot* slot = device < 0 ? 0 : slots[device];
  const Version* version = slot ? __atomic_load_n(&slot->current, __ATOMIC_ACQUIRE) : 0;
  if (!version || !version->kernels || version->op->num_arguments != count) return leave(0);
  const Operator* op = version->op;
  const int records = python->is_grad_enabled();
  char message[kMessage];
  u64 stack[2 * kMaxArguments];
  for (i64 i = 0; i < count; ++i) {
    if (!put(&op->arguments[i], values[i], device, records, &stack[i])) return leave(0);
  }
  Handle held[kMaxArguments];
  const i32 count_held = hold(op, stack, held);
  void* lock = python->release_lock();
  const enum Outcome outcome = version->run(op, version->kernels, stack, kDirect, message);
  python->take_lock(lock);
  for (i32 i = 0; i < count_held; ++i) aoti_torch_delete_tensor_object(held[i]);
  if (outcome == kDone) return take_results(stack, op->num_outputs);
  if (outcome == kNotStarted) return leave(0);
  python->set_error(python->runtime_error, message);
  return 0;
}
