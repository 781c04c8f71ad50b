// The steps of a call (see glue.h). Compiled once for each compiler; generated sources bring the tables.
#include "glue.h"

typedef struct {
  const Operator *op;
  u64 *stack;
  Value *values;
  Tensor *outputs;
  i64 *variables;  // sizes of named axes, -1 while unbound
  Shape *shapes;   // bound variadic axes
  i32 *families;   // dtypes of families, -1 while unbound
  u64 bound;       // mask of the bound variables
  i32 device_type, device_index, dtype;
  i32 has_device, gives_out, is_coded;
  char *message;
} Call;

#define FAIL(call, ...)                                \
  do {                                                 \
    snprintf((call)->message, kMessage, __VA_ARGS__);  \
    return 1;                                          \
  } while (0)
#define SHIM(call, expression)                                                     \
  do {                                                                             \
    if (expression) FAIL(call, "%s: %s failed", (call)->op->name, #expression);    \
  } while (0)

static u64 no_data;  // what the views of empty tensors point to: only absent ones are null

// ---- read -----------------------------------------------------------------------------------------------

static int inspect(Call *call, Tensor *t, Handle handle) {
  t->handle = handle;
  t->copy = 0;
  SHIM(call, aoti_torch_get_dim(handle, &t->ndim));
  SHIM(call, aoti_torch_get_sizes(handle, &t->sizes));
  SHIM(call, aoti_torch_get_strides(handle, &t->strides));
  SHIM(call, aoti_torch_get_dtype(handle, &t->dtype));
  return 0;
}

static int read_choice(Call *call, const Argument *argument, Value *value, Handle string) {
  const char *text;
  u64 length;
  SHIM(call, torch_string_c_str(string, &text));
  SHIM(call, torch_string_length(string, &length));
  for (value->number = 0; argument->choices[value->number]; ++value->number) {
    const char *choice = argument->choices[value->number];
    if (strlen(choice) == length && !strncmp(choice, text, length)) return 0;
  }
  FAIL(call, "%s: `%s` has no choice '%.*s'", call->op->name, argument->name, (int)length, text);
}

static int read_list(Call *call, Value *value, Handle list) {
  u64 count;
  SHIM(call, torch_list_size(list, &count));
  value->tensors = malloc((count ? count : 1) * sizeof(Tensor));
  for (u64 i = 0; i < count; ++i) {
    u64 item;
    SHIM(call, torch_list_get_item(list, i, &item));
    if (inspect(call, &value->tensors[i], (Handle)item)) return 1;
    value->count = (i64)i + 1;
  }
  return 0;
}

// Nothing is consumed: the stack still owns every handle afterwards, so that it can be passed on.
static int read(Call *call, Tensor *tensors) {
  const Operator *op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument *argument = &op->arguments[i];
    Value *value = &call->values[i];
    const u64 word = call->stack[i];
    value->count = 0;
    value->tensors = 0;
    value->views = 0;
    switch (argument->kind) {
      case kTensor: {
        Handle handle = (Handle)word;
        if (argument->optional) handle = word ? (Handle)*(u64 *)word : 0;
        if (!handle) break;
        value->tensors = &tensors[i];
        if (inspect(call, value->tensors, handle)) return 1;
        value->count = 1;
        break;
      }
      case kTensorList:
        if (read_list(call, value, (Handle)word)) return 1;
        break;
      case kInt:
        value->number = (i64)word;
        if (argument->variable >= 0) {
          call->variables[argument->variable] = (i64)word;
          call->bound |= 1ULL << argument->variable;
        }
        break;
      case kFloat:
        __builtin_memcpy(&value->real, &word, sizeof word);
        break;
      case kBool:
        value->number = (word & 0xff) != 0;
        break;
      case kChoice:
        value->number = (i64)word;
        if (!call->is_coded && read_choice(call, argument, value, (Handle)word)) return 1;
        break;
    }
  }
  return 0;
}

// ---- check ------------------------------------------------------------------------------------------------

static int bind_tensor(Call *call, const char *name, const TensorType *type, const Tensor *t) {
  const char *op = call->op->name;
  i32 device_type, device_index;
  SHIM(call, aoti_torch_get_device_type(t->handle, &device_type));
  SHIM(call, aoti_torch_get_device_index(t->handle, &device_index));
  if (!call->has_device) {
    call->has_device = 1;
    call->device_type = device_type;
    call->device_index = device_index;
  } else if (call->device_type != device_type || call->device_index != device_index) {
    FAIL(call, "%s: `%s` is on another device than the tensors before it", op, name);
  }
  if (t->dtype < 0 || t->dtype > 63 || !(type->dtypes >> t->dtype & 1)) {
    FAIL(call, "%s: `%s` has a dtype that the contract does not allow", op, name);
  }
  if (type->family >= 0) {
    i32 *bound = &call->families[type->family];
    if (*bound < 0) *bound = t->dtype;
    if (*bound != t->dtype) FAIL(call, "%s: `%s` differs in dtype from the tensors before it", op, name);
  }
  i64 variadic = -1;
  for (i32 a = 0; a < type->rank; ++a) {
    if (type->axes[a].kind == kVariadic) variadic = a;
  }
  if (variadic < 0 ? t->ndim != type->rank : t->ndim < type->rank - 1) {
    FAIL(call, "%s: `%s` has %lld axes, expected %s%d", op, name, t->ndim,
         variadic < 0 ? "" : "at least ", variadic < 0 ? type->rank : type->rank - 1);
  }
  for (i32 a = 0, d = 0; a < type->rank; ++a) {
    const Axis *axis = &type->axes[a];
    const i64 size = t->sizes[d];
    switch (axis->kind) {
      case kFixed:
        if (size != axis->size) {
          FAIL(call, "%s: axis %d of `%s` has size %lld, expected %lld", op, d, name, size, axis->size);
        }
        break;
      case kNamedAxis:
        if (!(call->bound >> axis->variable & 1)) {
          call->bound |= 1ULL << axis->variable;
          call->variables[axis->variable] = size;
        } else if (call->variables[axis->variable] != size) {
          FAIL(call, "%s: axis %d of `%s` has size %lld, expected %s = %lld", op, d, name, size,
               axis->text, call->variables[axis->variable]);
        }
        break;
      case kVariadic: {
        const i32 length = (i32)t->ndim - (type->rank - 1);
        if (axis->variable >= 0) {
          Shape *shape = &call->shapes[axis->variable];
          i32 differs = shape->length >= 0 && shape->length != length;
          for (i32 k = 0; !differs && shape->length >= 0 && k < length; ++k) {
            differs = shape->sizes[k] != t->sizes[d + k];
          }
          if (differs) FAIL(call, "%s: `%s` differs in the axes %s", op, name, axis->text);
          shape->length = length;
          shape->sizes = t->sizes + d;
        }
        d += length;
        continue;
      }
      case kComputed:
      case kAnonymous:
        break;
    }
    ++d;
  }
  return 0;
}

// True when everything that the axis computes from is bound, but for what it may solve for.
static int is_computable(const Call *call, const Axis *axis) {
  const u64 missing = axis->needs & ~call->bound;
  return !missing || (axis->solves >= 0 && missing == 1ULL << axis->solves);
}

static int check_computed(Call *call, const char *name, const TensorType *type, const Tensor *t) {
  for (i32 a = 0, d = 0; a < type->rank; ++a) {
    const Axis *axis = &type->axes[a];
    if (axis->kind == kVariadic) {
      d += (i32)t->ndim - (type->rank - 1);
      continue;
    }
    if (axis->kind == kComputed) {
      const i64 size = t->sizes[d];
      if (!is_computable(call, axis)) {
        FAIL(call, "%s: axis %d of `%s`, %s, is not bound", call->op->name, d, name, axis->text);
      }
      if (axis->solves >= 0 && !(call->bound >> axis->solves & 1)) {
        const i64 value = axis->solve(call->variables, size);
        if (value < 0) {
          FAIL(call, "%s: axis %d of `%s` has size %lld, which is not of the form %s",
               call->op->name, d, name, size, axis->text);
        }
        call->variables[axis->solves] = value;
        call->bound |= 1ULL << axis->solves;
      }
      const i64 expected = axis->value(call->variables);
      if (size != expected) {
        FAIL(call, "%s: axis %d of `%s` has size %lld, expected %s = %lld", call->op->name, d, name,
             size, axis->text, expected);
      }
    }
    ++d;
  }
  return 0;
}

static int check(Call *call) {
  const Operator *op = call->op;
  i32 has_computed = 0;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument *argument = &op->arguments[i];
    for (i64 k = 0; k < call->values[i].count; ++k) {
      if (bind_tensor(call, argument->name, &argument->type, &call->values[i].tensors[k])) return 1;
    }
    for (i32 a = 0; a < argument->type.rank; ++a) {
      has_computed |= argument->type.axes[a].kind == kComputed;
    }
  }
  for (i32 i = 0; has_computed && i < op->num_arguments; ++i) {
    const Argument *argument = &op->arguments[i];
    for (i64 k = 0; k < call->values[i].count; ++k) {
      if (check_computed(call, argument->name, &argument->type, &call->values[i].tensors[k])) return 1;
    }
  }
  call->dtype = op->scalar_family >= 0 ? call->families[op->scalar_family] : -1;
  return 0;
}

// ---- allocate -----------------------------------------------------------------------------------------------

static int empty_tensor(Call *call, i64 ndim, const i64 *sizes, i32 dtype, Handle *made) {
  i64 strides[kMaxDims];
  i64 step = 1;
  for (i64 d = ndim - 1; d >= 0; --d) {
    strides[d] = step;
    step *= sizes[d] > 1 ? sizes[d] : 1;
  }
  SHIM(call, aoti_torch_empty_strided(ndim, sizes, strides, dtype, call->device_type,
                                      call->device_index, made));
  return 0;
}

static int is_absent(const Call *call, i32 output) {
  const i32 of = call->op->outputs[output].gradient_of;
  return of >= 0 && !call->values[of].count;
}

// `sizes` has room for kMaxDims + kMaxRank.
static int output_shape(Call *call, i32 index, i64 *sizes, i32 *ndim) {
  const Output *output = &call->op->outputs[index];
  *ndim = 0;
  if (is_absent(call, index)) {
    sizes[(*ndim)++] = 0;
    return 0;
  }
  for (i32 a = 0; a < output->type.rank; ++a) {
    const Axis *axis = &output->type.axes[a];
    if (axis->kind == kVariadic) {
      const Shape *shape = &call->shapes[axis->variable];
      if (shape->length < 0 || *ndim + shape->length > kMaxDims) {
        FAIL(call, "%s: the axes %s are not bound", call->op->name, axis->text);
      }
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
      if (axis->needs & ~call->bound) FAIL(call, "%s: the axis %s is not bound", call->op->name, axis->text);
      size = axis->value(call->variables);
    }
    if (size < 0) FAIL(call, "%s: the axis %s would have size %lld", call->op->name, axis->text, size);
    sizes[(*ndim)++] = size;
  }
  if (*ndim > kMaxDims) FAIL(call, "%s: `%s` would have %d axes", call->op->name, output->name, *ndim);
  return 0;
}

static int output_dtype(Call *call, const Output *output, i32 *dtype) {
  *dtype = output->type.family >= 0 ? call->families[output->type.family] : output->type.kernel_dtype;
  if (*dtype < 0) FAIL(call, "%s: the dtype of `%s` is not bound", call->op->name, output->name);
  return 0;
}

static int allocate(Call *call) {
  const Operator *op = call->op;
  for (i32 i = 0; i < op->num_outputs; ++i) {
    const Output *output = &op->outputs[i];
    Tensor *t = &call->outputs[i];
    i64 sizes[kMaxDims + kMaxRank];
    i32 ndim, dtype;
    if (output_shape(call, i, sizes, &ndim) || output_dtype(call, output, &dtype)) return 1;
    if (!call->gives_out) {
      Handle made;
      if (empty_tensor(call, ndim, sizes, dtype, &made)) return 1;
      if (inspect(call, t, made)) return 1;
      continue;
    }
    if (inspect(call, t, (Handle)call->stack[op->num_arguments + i])) return 1;
    i32 differs = t->ndim != ndim || t->dtype != dtype;
    for (i32 d = 0; !differs && d < ndim; ++d) differs = t->sizes[d] != sizes[d];
    i32 device_type, device_index;
    SHIM(call, aoti_torch_get_device_type(t->handle, &device_type));
    SHIM(call, aoti_torch_get_device_index(t->handle, &device_index));
    differs |= device_type != call->device_type || device_index != call->device_index;
    if (differs) FAIL(call, "%s: out has not the shape, dtype and device of the result", op->name);
  }
  return 0;
}

// ---- view -----------------------------------------------------------------------------------------------------

static i64 numel(const Tensor *t) {
  i64 count = 1;
  for (i64 d = 0; d < t->ndim; ++d) count *= t->sizes[d];
  return count;
}

// Fills sizes and strides of the view; returns 0 when a variadic axis cannot be one dimension.
static int collapse(const TensorType *type, i64 ndim, const i64 *sizes, const i64 *strides, u64 *view) {
  i64 *out_sizes = (i64 *)view + 1, *out_strides = out_sizes + type->rank;
  for (i32 a = 0, d = 0; a < type->rank; ++a) {
    const i32 length = type->axes[a].kind == kVariadic ? (i32)ndim - (type->rank - 1) : 1;
    i64 size = 1, stride = 1, is_empty = 0;
    for (i32 k = d + length - 1; k >= d; --k) {
      if (sizes[k] == 1) continue;
      is_empty |= sizes[k] == 0;
      if (size == 1) {
        size = sizes[k];
        stride = strides[k];
      } else if (is_empty || strides[k] == size * stride) {
        size *= sizes[k];
      } else {
        return 0;
      }
    }
    out_sizes[a] = is_empty ? 0 : size;
    out_strides[a] = stride;
    d += length;
  }
  return 1;
}

static int overlaps(Call *call, const Tensor *out, const char *data) {
  // The address range of `out` against those of the inputs; elements are at most 8 bytes.
  i64 low = 0, high = 0;
  for (i64 d = 0; d < out->ndim; ++d) {
    const i64 reach = (out->sizes[d] - 1) * out->strides[d];
    *(reach < 0 ? &low : &high) += reach;
  }
  for (i32 i = 0; i < call->op->num_arguments; ++i) {
    for (i64 k = 0; k < call->values[i].count; ++k) {
      const Tensor *t = &call->values[i].tensors[k];
      const void *other;
      if (torch_get_const_data_ptr(t->handle, &other)) return 1;
      i64 from = 0, to = 0;
      for (i64 d = 0; d < t->ndim; ++d) {
        const i64 reach = (t->sizes[d] - 1) * t->strides[d];
        *(reach < 0 ? &from : &to) += reach;
      }
      const char *begin = (const char *)other + from * 8, *end = (const char *)other + (to + 1) * 8;
      if (begin < data + (high + 1) * 8 && data + low * 8 < end) return 1;
    }
  }
  return 0;
}

// Prepares what the kernel sees of one tensor. `writes`: it is an output or mutated.
static int make_view(Call *call, const TensorType *type, Tensor *t, int writes, int is_output) {
  const i32 dtype = type->kernel_dtype >= 0 ? type->kernel_dtype : t->dtype;
  void *data;
  for (i64 d = 0; writes && d < t->ndim; ++d) {
    if (t->sizes[d] > 1 && t->strides[d] == 0) {
      FAIL(call, "%s: it cannot write into an expanded tensor, whose elements share memory", call->op->name);
    }
  }
  int direct = dtype == t->dtype && collapse(type, t->ndim, t->sizes, t->strides, t->view);
  if (direct) {
    SHIM(call, writes ? torch_get_mutable_data_ptr(t->handle, &data)
                      : torch_get_const_data_ptr(t->handle, (const void **)&data));
    if (is_output && call->gives_out && overlaps(call, t, data)) direct = 0;
  }
  if (!direct) {
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

static int make_views(Call *call, void **arguments) {
  static const u64 absent[1 + 2 * kMaxRank];
  const Operator *op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument *argument = &op->arguments[i];
    Value *value = &call->values[i];
    for (i64 k = 0; k < value->count; ++k) {
      if (make_view(call, &argument->type, &value->tensors[k], argument->mutated, 0)) return 1;
    }
    switch (argument->kind) {
      case kTensor:
        arguments[i] = value->count ? (void *)value->tensors[0].view : (void *)absent;
        break;
      case kTensorList: {
        const u64 bytes = 8 * (1 + 2 * (u64)argument->type.rank);
        value->views = malloc((value->count ? (u64)value->count : 1) * bytes);
        for (i64 k = 0; k < value->count; ++k) {
          __builtin_memcpy((char *)value->views + (u64)k * bytes, value->tensors[k].view, bytes);
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
    Tensor *t = &call->outputs[i];
    if (is_absent(call, i)) {
      arguments[op->num_arguments + i] = (void *)absent;
      continue;
    }
    if (make_view(call, &op->outputs[i].type, t, 1, 1)) return 1;
    arguments[op->num_arguments + i] = t->view;
  }
  return 0;
}

// ---- launch and finish --------------------------------------------------------------------------------------

// What to do about empty outputs: all are empty, so there is nothing to compute; or some are, which
// kernels are not asked to handle, so the reference computes the others.
enum Emptiness { kNoneEmpty, kAllEmpty, kSomeEmpty };

static enum Emptiness emptiness(const Call *call) {
  const Operator *op = call->op;
  i32 empty = 0, full = 0;
  for (i32 i = 0; i < op->num_outputs; ++i) {
    if (!is_absent(call, i)) *(numel(&call->outputs[i]) ? &full : &empty) += 1;
  }
  for (i32 i = 0; i < op->num_arguments; ++i) {
    for (i64 k = 0; op->arguments[i].mutated && k < call->values[i].count; ++k) {
      *(numel(&call->values[i].tensors[k]) ? &full : &empty) += 1;
    }
  }
  return !empty ? kNoneEmpty : full ? kSomeEmpty : kAllEmpty;
}

static int copy_back(Call *call) {
  const Operator *op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    for (i64 k = 0; op->arguments[i].mutated && k < call->values[i].count; ++k) {
      Tensor *t = &call->values[i].tensors[k];
      if (t->copy) SHIM(call, aoti_torch_copy_(t->handle, t->copy, 0));
    }
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor *t = &call->outputs[i];
    if (t->copy) SHIM(call, aoti_torch_copy_(t->handle, t->copy, 0));
  }
  return 0;
}

static int compute(Call *call, const Kernel *kernel) {
  void *arguments[2 * kMaxArguments];
  if (make_views(call, arguments)) return 1;
  const char *failure = kernel->launch(call->dtype, arguments);
  if (failure) FAIL(call, "%s: %s", call->op->name, failure);
  return copy_back(call);
}

// Frees what the call made and what the stack owned; outputs are kept only on success.
static void release(Call *call, int failed) {
  const Operator *op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument *argument = &op->arguments[i];
    Value *value = &call->values[i];
    for (i64 k = 0; k < value->count; ++k) {
      Tensor *t = &value->tensors[k];
      if (t->copy) aoti_torch_delete_tensor_object(t->copy);
      if (argument->kind == kTensorList) aoti_torch_delete_tensor_object(t->handle);
    }
    if (argument->kind == kTensor && !argument->optional) {
      aoti_torch_delete_tensor_object((Handle)call->stack[i]);
    } else if (argument->kind == kTensor && call->stack[i]) {
      aoti_torch_delete_tensor_object((Handle)*(u64 *)call->stack[i]);
      operator_delete((void *)call->stack[i]);
    }
    if (argument->kind == kTensorList) {
      torch_delete_list((Handle)call->stack[i]);
      free(value->tensors);
      free(value->views);
    }
    if (argument->kind == kChoice && !call->is_coded) torch_delete_string((Handle)call->stack[i]);
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor *t = &call->outputs[i];
    if (t->copy) aoti_torch_delete_tensor_object(t->copy);
    if (failed && call->gives_out) aoti_torch_delete_tensor_object((Handle)call->stack[op->num_arguments + i]);
    if (failed && !call->gives_out && t->handle) aoti_torch_delete_tensor_object(t->handle);
  }
  for (i32 i = 0; !failed && i < op->num_outputs; ++i) call->stack[i] = (u64)call->outputs[i].handle;
}

// Lets the reference compute: for a dtype that the kernel was not instantiated for, and beside empty
// outputs. Arguments are handed on with references of their own.
static int call_reference(Call *call) {
  const Operator *op = call->op;
  u64 stack[2 * kMaxArguments];
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument *argument = &op->arguments[i];
    const Value *value = &call->values[i];
    stack[i] = call->stack[i];
    if (argument->kind == kChoice) stack[i] = (u64)value->number;
    if (argument->kind == kTensor && value->count) {
      Handle shared;
      SHIM(call, aoti_torch_new_tensor_handle(value->tensors[0].handle, &shared));
      stack[i] = (u64)shared;
      if (argument->optional) {
        u64 *cell = operator_new(sizeof *cell);
        *cell = (u64)shared;
        stack[i] = (u64)cell;
      }
    }
    if (argument->kind == kTensorList) {
      Handle list;
      SHIM(call, torch_new_list_reserve_size((u64)value->count, &list));
      for (i64 k = 0; k < value->count; ++k) {
        Handle shared;
        SHIM(call, aoti_torch_new_tensor_handle(value->tensors[k].handle, &shared));
        SHIM(call, torch_list_push_back(list, (u64)shared));
      }
      stack[i] = (u64)list;
    }
  }
  if (torch_call_dispatcher(op->reference, "", stack, TARGET_VERSION)) {
    FAIL(call, "%s: the reference failed", op->name);
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor *t = &call->outputs[i];
    if (!call->gives_out) {
      if (t->handle) aoti_torch_delete_tensor_object(t->handle);
      t->handle = (Handle)stack[i];
      continue;
    }
    t->handle = (Handle)call->stack[op->num_arguments + i];
    const i32 failed = aoti_torch_copy_(t->handle, (Handle)stack[i], 0);
    aoti_torch_delete_tensor_object((Handle)stack[i]);
    if (failed) FAIL(call, "%s: out has not the shape of the result", op->name);
  }
  return 0;
}

void opwright_run(const Operator *op, const Kernel *kernel, u64 *stack, enum Form form) {
  char message[kMessage];
  Value values[op->num_arguments + 1];
  Tensor tensors[op->num_arguments + 1], outputs[op->num_outputs + 1];
  i64 variables[op->num_variables + 1];
  Shape shapes[op->num_shapes + 1];
  i32 families[op->num_families + 1];
  Call call = {.op = op, .stack = stack, .values = values, .outputs = outputs,
               .variables = variables, .shapes = shapes, .families = families,
               .gives_out = form == kOut, .is_coded = form == kCoded, .message = message};
  for (i32 i = 0; i < op->num_arguments; ++i) values[i].count = 0, values[i].tensors = 0, values[i].views = 0;
  for (i32 i = 0; i < op->num_variables; ++i) variables[i] = 0;
  for (i32 i = 0; i < op->num_shapes; ++i) shapes[i].length = -1;
  for (i32 i = 0; i < op->num_families; ++i) families[i] = -1;
  for (i32 i = 0; i < op->num_outputs; ++i) outputs[i].handle = 0, outputs[i].copy = 0;

  int failed = read(&call, tensors) || check(&call);
  const int has_kernel = kernel->launch && (op->scalar_family < 0 || (call.dtype >= 0 && *kernel->dtypes >> call.dtype & 1));
  if (!failed && !has_kernel) {
    failed = call_reference(&call);
  } else if (!failed && !(failed = allocate(&call))) {
    const enum Emptiness empty = emptiness(&call);
    if (empty == kNoneEmpty) failed = compute(&call, kernel);
    if (empty == kSomeEmpty) failed = call_reference(&call);
  }
  release(&call, failed);
  if (failed) aoti_torch_check(0, op->name, "opwright", 0, message);
}

// ---- services for kernels -------------------------------------------------------------------------------------

int opwright_parallel_for(i64 begin, i64 end, i64 grain, void (*body)(i64, i64, void *), void *context) {
  return torch_parallel_for(begin, end, grain, body, context);
}

int opwright_num_threads(void) {
  u32 count = 1;
  return torch_get_num_threads(&count) ? 1 : (int)count;
}

// ---- registration -----------------------------------------------------------------------------------------------

static Handle library;

i32 opwright_register_entries(const char *ns, const char *key, const Entry *entries, i32 count) {
  if (library) return 0;
  if (aoti_torch_library_init_impl(ns, key, "opwright", 0, &library)) return 1;
  for (i32 i = 0; i < count; ++i) {
    if (torch_library_impl(library, entries[i].name, entries[i].kernel, TARGET_VERSION)) return 1;
  }
  return 0;
}

i32 opwright_unregister_entries(void) {
  const Handle held = library;
  library = 0;
  return held ? aoti_torch_delete_library_object(held) : 0;
}
