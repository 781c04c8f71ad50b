// What kernels see of memory: outputs that are allocated, views of tensors, scratch space.
#include "call.h"

static __thread Call* running;  // the call whose kernel is being launched by this thread
static u64 no_data;  // what the views of empty tensors point to: only absent ones are null

// ---- allocate
// -----------------------------------------------------------------------------------------------

static int empty_tensor(Call* call, i64 ndim, const i64* sizes, i32 dtype, Handle* made) {
  i64 strides[kMaxDims];
  i64 step = 1;
  if (ndim > kMaxDims)
    FAIL(call, "%s: a tensor of %lld axes, more than %d", call->op->name, ndim, kMaxDims);
  for (i64 d = ndim - 1; d >= 0; --d) {
    strides[d] = step;
    if (__builtin_mul_overflow(step, max_of(sizes[d], 1), &step)) {
      FAIL(call, "%s: a tensor with more elements than 64 bits count", call->op->name);
    }
  }
  SHIM(call, aoti_torch_empty_strided(ndim, sizes, strides, dtype, call->device_type,
                                      call->device_index, made));
  return 0;
}

static int is_absent(const Call* call, i32 output) {
  const i32 of = call->op->outputs[output].gradient_of;
  return of >= 0 && !call->values[of].count;
}

static int refuse_depth(Call* call, const Output* output) {
  FAIL(call, "%s: `%s` would have more than %d axes", call->op->name, output->name, kMaxDims);
}

// `sizes` has room for kMaxDims + kMaxRank.
static int output_shape(Call* call, i32 index, i64* sizes, i32* ndim) {
  const Output* output = &call->op->outputs[index];
  *ndim = 0;
  if (is_absent(call, index)) {
    sizes[(*ndim)++] = 0;
    return 0;
  }
  for (i32 a = 0; a < output->type.rank; ++a) {
    const Axis* axis = &output->type.axes[a];
    if (axis->kind == kVariadic) {
      const Shape* shape = &call->shapes[axis->variable];
      if (shape->length < 0)
        FAIL(call, "%s: the axes %s are not bound", call->op->name, axis->text);
      if (*ndim + shape->length > kMaxDims) return refuse_depth(call, output);
      for (i32 k = 0; k < shape->length; ++k) sizes[(*ndim)++] = shape->sizes[k];
      continue;
    }
    i64 size = axis->size;
    if (axis->kind == kNamedAxis) {
      if (!(call->bound >> axis->variable & 1)) {
        FAIL(call, "%s: the axis %s is not bound", call->op->name, axis->text);
      }
      size = call->variables[axis->variable];
    } else if (axis->kind == kComputed) {
      if (axis->needs & ~call->bound)
        FAIL(call, "%s: the axis %s is not bound", call->op->name, axis->text);
      if (evaluate(call, axis, &size)) return 1;
    }
    if (size < 0)
      FAIL(call, "%s: the axis %s would have size %lld", call->op->name, axis->text, size);
    sizes[(*ndim)++] = size;
  }
  return *ndim > kMaxDims ? refuse_depth(call, output) : 0;
}

static int output_dtype(Call* call, const Output* output, i32* dtype) {
  *dtype =
      output->type.family >= 0 ? call->families[output->type.family] : output->type.kernel_dtype;
  if (*dtype < 0) FAIL(call, "%s: the dtype of `%s` is not bound", call->op->name, output->name);
  return 0;
}

static int cannot_allocate(Call* call, const char* what, i32 ndim, const i64* sizes) {
  char shape[256];
  i32 length = 0;
  shape[0] = 0;
  for (i32 d = 0; d < ndim && length < 200; ++d) {
    length += snprintf(shape + length, sizeof shape - (u64)length, d ? ", %lld" : "%lld", sizes[d]);
  }
  FAIL(call, "%s: cannot allocate `%s` [%s]", call->op->name, what, shape);
}

// Reads the tensors of the out variant and holds them to the contract.
static int read_out(Call* call) {
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor* t = &call->outputs[i];
    i64 sizes[kMaxDims + kMaxRank];
    i32 ndim, dtype, device_type, device_index;
    if (output_shape(call, i, sizes, &ndim) || output_dtype(call, &op->outputs[i], &dtype))
      return 1;
    if (inspect(call, t, (Handle)call->stack[op->num_arguments + i])) return 1;
    SHIM(call, aoti_torch_get_device_type(t->handle, &device_type));
    SHIM(call, aoti_torch_get_device_index(t->handle, &device_index));
    i32 differs = t->ndim != ndim || t->dtype != dtype || device_type != call->device_type ||
                  device_index != call->device_index;
    for (i32 d = 0; !differs && d < ndim; ++d) differs = t->sizes[d] != sizes[d];
    if (differs) FAIL(call, "%s: out has not the shape, dtype and device of the result", op->name);
  }
  return 0;
}

static int allocate(Call* call) {
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_outputs; ++i) {
    i64 sizes[kMaxDims + kMaxRank];
    i32 ndim, dtype;
    Handle made;
    if (output_shape(call, i, sizes, &ndim) || output_dtype(call, &op->outputs[i], &dtype))
      return 1;
    if (empty_tensor(call, ndim, sizes, dtype, &made)) {
      return cannot_allocate(call, op->outputs[i].name, ndim, sizes);
    }
    if (inspect(call, &call->outputs[i], made)) return 1;
  }
  return 0;
}

// ---- view
// -----------------------------------------------------------------------------------------------------

// Fills sizes and strides of the view; returns 0 when a variadic axis cannot be one dimension. A
// tensor without elements can have any strides: kernels see those of a contiguous one.
static int collapse(const TensorType* type, i64 ndim, const i64* sizes, const i64* strides,
                    u64* view) {
  i64 *out_sizes = (i64*)view + 1, *out_strides = out_sizes + type->rank;
  i64 step, has_elements = 1;
  for (i32 a = 0, d = 0; a < type->rank; ++a) {
    const i32 length = type->axes[a].kind == kVariadic ? (i32)ndim - (type->rank - 1) : 1;
    i64 size = 1, stride = 1, is_empty = 0;
    for (i32 k = d + length - 1; k >= d; --k) {
      if (sizes[k] == 1) continue;
      is_empty |= sizes[k] == 0;
      if (size == 1) {
        size = sizes[k];
        stride = strides[k];
      } else if (!is_empty && (__builtin_mul_overflow(size, stride, &step) || strides[k] != step ||
                               __builtin_mul_overflow(size, sizes[k], &size))) {
        return 0;  // only tensors without elements have strides or sizes that exceed 64 bits
      }
    }
    out_sizes[a] = is_empty ? 0 : size;
    out_strides[a] = stride;
    has_elements &= !is_empty;
    d += length;
  }
  if (has_elements) return 1;
  step = 1;
  for (i32 a = type->rank - 1; a >= 0; --a) {
    out_strides[a] = step;
    if (__builtin_mul_overflow(step, max_of(out_sizes[a], 1), &step)) return 0;
  }
  return 1;
}

// True when a kernel may see the memory of a tensor itself; else it sees a dense copy. A tensor
// that is read or mutated may have any strides that fit the view; an output is contiguous, and
// nothing else lies on it.
static int is_usable(const Call* call, const TensorType* type, Tensor* t, i32 dtype,
                     int is_output) {
  if (dtype != t->dtype) return 0;
  if (is_output && call->gives_out && (t->is_shared || !is_contiguous(t))) return 0;
  return collapse(type, t->ndim, t->sizes, t->strides, t->view);
}

// Prepares what the kernel sees of one tensor. `writes`: it is an output or mutated.
static int make_view(Call* call, const TensorType* type, Tensor* t, int writes, int is_output) {
  const i32 dtype = type->kernel_dtype >= 0 ? type->kernel_dtype : t->dtype;
  void* data;
  if (is_usable(call, type, t, dtype, is_output)) {
    SHIM(call, writes ? torch_get_mutable_data_ptr(t->handle, &data)
                      : torch_get_const_data_ptr(t->handle, (const void**)&data));
  } else {
    i64 *sizes, *strides;
    if (empty_tensor(call, t->ndim, t->sizes, dtype, &t->copy)) return 1;
    if (!is_output) SHIM(call, aoti_torch_copy_(t->copy, t->handle, 0));
    SHIM(call, aoti_torch_get_sizes(t->copy, &sizes));
    SHIM(call, aoti_torch_get_strides(t->copy, &strides));
    collapse(type, t->ndim, sizes, strides, t->view);
    SHIM(call, torch_get_mutable_data_ptr(t->copy, &data));
  }
  t->view[0] = (u64)(data ? data : &no_data);
  return 0;
}

static int make_views(Call* call, void** arguments) {
  static const u64 absent[1 + 2 * kMaxRank];
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument* argument = &op->arguments[i];
    Value* value = &call->values[i];
    for (i64 k = 0; k < value->count; ++k) {
      if (make_view(call, &argument->type, &value->tensors[k], argument->mutated, 0)) return 1;
    }
    switch (argument->kind) {
      case kTensor:
        arguments[i] = value->count ? (void*)value->tensors[0].view : (void*)absent;
        break;
      case kTensorList: {
        const u64 bytes = 8 * (1 + 2 * (u64)argument->type.rank);
        value->views = malloc((value->count ? (u64)value->count : 1) * bytes);
        if (!value->views)
          FAIL(call, "%s: there is no memory for a list of %lld tensors", op->name, value->count);
        for (i64 k = 0; k < value->count; ++k) {
          __builtin_memcpy((char*)value->views + (u64)k * bytes, value->tensors[k].view, bytes);
        }
        value->list.data = value->views;
        value->list.size = value->count;
        arguments[i] = &value->list;
        break;
      }
      case kFloat:
        arguments[i] = &value->real;
        break;
      default:
        arguments[i] = &value->number;
    }
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor* t = &call->outputs[i];
    if (is_absent(call, i)) {
      arguments[op->num_arguments + i] = (void*)absent;
      continue;
    }
    if (make_view(call, &op->outputs[i].type, t, 1, 1)) return 1;
    arguments[op->num_arguments + i] = t->view;
  }
  return 0;
}

// ---- scratch
// --------------------------------------------------------------------------------------------------

// For kernels (scratch.h): memory on the device of the call that this thread works for; its other
// threads may ask at the same time.
void* opwright_scratch(i64 bytes) {
  Call* call = running;
  const i64 stride = 1;
  void* data;
  if (!call || bytes < 0) return 0;
  Scratch* made = malloc(sizeof *made);
  if (!made) return 0;
  if (aoti_torch_empty_strided(1, &bytes, &stride, kUInt8, call->device_type, call->device_index,
                               &made->tensor)) {
    free(made);
    return 0;
  }
  made->next = __atomic_load_n(&call->scratch, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&call->scratch, &made->next, made, 1, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
  }
  if (torch_get_mutable_data_ptr(made->tensor, &data)) return 0;
  return data ? data : &no_data;
}
