// The first two steps of a call: it is read from the dispatcher's stack and held to the contract.
#include "call.h"

// ---- read
// -----------------------------------------------------------------------------------------------

static int inspect(Call* call, Tensor* t, Handle handle) {
  t->handle = handle;
  t->copy = 0;
  t->is_shared = 0;
  SHIM(call, aoti_torch_get_dim(handle, &t->ndim));
  call->is_deep |= t->ndim > kMaxDims;
  SHIM(call, aoti_torch_get_sizes(handle, &t->sizes));
  SHIM(call, aoti_torch_get_strides(handle, &t->strides));
  SHIM(call, aoti_torch_get_dtype(handle, &t->dtype));
  return 0;
}

static int read_choice(Call* call, const Argument* argument, Value* value, Handle string) {
  const char* text;
  u64 length;
  SHIM(call, torch_string_c_str(string, &text));
  SHIM(call, torch_string_length(string, &length));
  for (value->number = 0; argument->choices[value->number]; ++value->number) {
    const char* choice = argument->choices[value->number];
    if (strlen(choice) == length && !strncmp(choice, text, length)) return 0;
  }
  FAIL(call, "%s: `%s` has no choice '%.*s'", call->op->name, argument->name, (int)length, text);
}

static int read_list(Call* call, Value* value, Handle list) {
  u64 count;
  SHIM(call, torch_list_size(list, &count));
  value->tensors = malloc((count ? count : 1) * sizeof(Tensor));
  if (!value->tensors)
    FAIL(call, "%s: there is no memory for a list of %llu tensors", call->op->name, count);
  for (u64 i = 0; i < count; ++i) {
    u64 item;
    SHIM(call, torch_list_get_item(list, i, &item));
    if (inspect(call, &value->tensors[i], (Handle)item)) return 1;
    value->count = (i64)i + 1;
  }
  return 0;
}

// Nothing is consumed: the stack still owns every handle afterwards, so that it can be passed on.
static int read(Call* call, Tensor* tensors) {
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument* argument = &op->arguments[i];
    Value* value = &call->values[i];
    const u64 word = call->stack[i];
    value->count = 0;
    value->tensors = 0;
    value->views = 0;
    switch (argument->kind) {
      case kTensor: {
        Handle handle = (Handle)word;
        if (argument->optional && !call->is_direct) handle = word ? (Handle) * (u64*)word : 0;
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

// ---- check
// ------------------------------------------------------------------------------------------------

static int bind_tensor(Call* call, const char* name, const TensorType* type, const Tensor* t) {
  const char* op = call->op->name;
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
    i32* bound = &call->families[type->family];
    if (*bound < 0) *bound = t->dtype;
    if (*bound != t->dtype)
      FAIL(call, "%s: `%s` differs in dtype from the tensors before it", op, name);
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
    const Axis* axis = &type->axes[a];
    const i64 size = t->sizes[d];
    switch (axis->kind) {
      case kFixed:
        if (size != axis->size) {
          FAIL(call, "%s: axis %d of `%s` has size %lld, expected %lld", op, d, name, size,
               axis->size);
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
          Shape* shape = &call->shapes[axis->variable];
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

// The size of a computed axis whose variables are bound.
static int evaluate(Call* call, const Axis* axis, i64* size) {
  i32 has_none = 0;
  *size = axis->value(call->variables, &has_none);
  if (has_none) {
    FAIL(call, "%s: the axis %s has no size: it divides by zero, or exceeds 64 bits",
         call->op->name, axis->text);
  }
  return 0;
}

// True when everything that the axis computes from is bound, but for what it may solve for.
static int is_computable(const Call* call, const Axis* axis) {
  const u64 missing = axis->needs & ~call->bound;
  return !missing || (axis->solves >= 0 && missing == 1ULL << axis->solves);
}

static int check_computed(Call* call, const char* name, const TensorType* type, const Tensor* t) {
  for (i32 a = 0, d = 0; a < type->rank; ++a) {
    const Axis* axis = &type->axes[a];
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
      i64 expected;
      if (evaluate(call, axis, &expected)) return 1;
      if (size != expected) {
        FAIL(call, "%s: axis %d of `%s` has size %lld, expected %s = %lld", call->op->name, d, name,
             size, axis->text, expected);
      }
    }
    ++d;
  }
  return 0;
}

static int check(Call* call) {
  const Operator* op = call->op;
  i32 has_computed = 0;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument* argument = &op->arguments[i];
    for (i64 k = 0; k < call->values[i].count; ++k) {
      if (bind_tensor(call, argument->name, &argument->type, &call->values[i].tensors[k])) return 1;
    }
    for (i32 a = 0; a < argument->type.rank; ++a) {
      has_computed |= argument->type.axes[a].kind == kComputed;
    }
  }
  for (i32 i = 0; has_computed && i < op->num_arguments; ++i) {
    const Argument* argument = &op->arguments[i];
    for (i64 k = 0; k < call->values[i].count; ++k) {
      if (check_computed(call, argument->name, &argument->type, &call->values[i].tensors[k]))
        return 1;
    }
  }
  call->dtype = op->scalar_family >= 0 ? call->families[op->scalar_family] : -1;
  return 0;
}
