// The steps of a call. Compiled once for each compiler, as one unit so that they inline into each
// other; generated sources bring the tables. What few calls need is compiled beside it, at the same
// time: overlap.c.
#include "contract.c"
#include "memory.c"
#include "tensor.c"

// ---- launch and finish
// --------------------------------------------------------------------------------------

// What to do about empty outputs: all are empty, so there is nothing to compute; or some are, which
// kernels are not asked to handle, so the reference computes the others. Outputs that the caller
// left out do not count beside others.
enum Emptiness { kNoneEmpty, kAllEmpty, kSomeEmpty };

// True when an axis is 0 because the int arguments in its expression are: `keep*T` without `keep`.
static int is_left_out(const Call* call, const TensorType* type) {
  for (i32 a = 0; a < type->rank; ++a) {
    const Axis* axis = &type->axes[a];
    i32 has_none = 0;
    if (axis->kind != kComputed || !axis->switches || axis->value(call->variables, &has_none))
      continue;
    u64 on = 0;
    for (i32 v = 0; v < call->op->num_variables; ++v) on |= (u64) !!call->variables[v] << v;
    if (!(axis->switches & on)) return 1;
  }
  return 0;
}

static enum Emptiness emptiness(const Call* call) {
  const Operator* op = call->op;
  i32 empty = 0, full = 0, left_out = 0;
  for (i32 i = 0; i < op->num_outputs; ++i) {
    if (is_absent(call, i)) continue;
    const i32 is_empty = !numel(&call->outputs[i]);
    *(!is_empty ? &full : is_left_out(call, &op->outputs[i].type) ? &left_out : &empty) += 1;
  }
  for (i32 i = 0; i < op->num_arguments; ++i) {
    for (i64 k = 0; op->arguments[i].mutated && k < call->values[i].count; ++k) {
      *(numel(&call->values[i].tensors[k]) ? &full : &empty) += 1;
    }
  }
  if (!full && (empty || left_out)) return kAllEmpty;
  return empty ? kSomeEmpty : kNoneEmpty;
}

static int copy_back(Call* call) {
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    for (i64 k = 0; op->arguments[i].mutated && k < call->values[i].count; ++k) {
      Tensor* t = &call->values[i].tensors[k];
      if (t->copy) SHIM(call, aoti_torch_copy_(t->handle, t->copy, 0));
    }
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor* t = &call->outputs[i];
    if (t->copy) SHIM(call, aoti_torch_copy_(t->handle, t->copy, 0));
  }
  return 0;
}

static int launch(Call* call, const Kernel* kernel, void** arguments) {
  const int is_cuda = call->has_device && call->device_type == kCuda;
  void* stream = 0;
  Handle guard = 0;
  if (is_cuda) {
    if (!aoti_torch_create_cuda_guard) FAIL(call, "%s: this torch has no CUDA", call->op->name);
    SHIM(call, aoti_torch_create_cuda_guard(call->device_index, &guard));
    if (aoti_torch_get_current_cuda_stream(call->device_index, &stream)) {
      aoti_torch_delete_cuda_guard(guard);
      FAIL(call, "%s: there is no current stream on cuda:%d", call->op->name, call->device_index);
    }
    arguments[call->op->num_arguments + call->op->num_outputs] = &stream;
  }
  Call* const before = running;
  running = call;
  call->has_started = 1;
  const char* failure = kernel->launch(call->dtype, arguments);
  running = before;
  if (guard) aoti_torch_delete_cuda_guard(guard);
  if (failure) FAIL(call, "%s: %s", call->op->name, failure);
  return 0;
}

static int compute(Call* call, const Kernel* kernel) {
  void* arguments[2 * kMaxArguments + 1];
  return make_views(call, arguments) || launch(call, kernel, arguments) || copy_back(call);
}

// Frees what the call made and what the stack owned; outputs are kept only on success.
static void release(Call* call, int failed) {
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument* argument = &op->arguments[i];
    Value* value = &call->values[i];
    for (i64 k = 0; k < value->count; ++k) {
      Tensor* t = &value->tensors[k];
      if (t->copy) aoti_torch_delete_tensor_object(t->copy);
      if (argument->kind == kTensorList) aoti_torch_delete_tensor_object(t->handle);
    }
    const i32 owns = argument->kind == kTensor && !call->is_direct;
    if (owns && !argument->optional) {
      aoti_torch_delete_tensor_object((Handle)call->stack[i]);
    } else if (owns && call->stack[i]) {
      aoti_torch_delete_tensor_object((Handle) * (u64*)call->stack[i]);
      operator_delete((void*)call->stack[i]);
    }
    if (argument->kind == kTensorList) {
      torch_delete_list((Handle)call->stack[i]);
      free(value->tensors);
      free(value->views);
    }
    if (argument->kind == kChoice && !call->is_coded) torch_delete_string((Handle)call->stack[i]);
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor* t = &call->outputs[i];
    if (t->copy) aoti_torch_delete_tensor_object(t->copy);
    if (failed && call->gives_out)
      aoti_torch_delete_tensor_object((Handle)call->stack[op->num_arguments + i]);
    if (failed && !call->gives_out && t->handle) aoti_torch_delete_tensor_object(t->handle);
  }
  // PyTorch's allocator hands memory on in the order of the stream: work that is queued may still
  // use it.
  for (Scratch* next; call->scratch; call->scratch = next) {
    next = call->scratch->next;
    aoti_torch_delete_tensor_object(call->scratch->tensor);
    free(call->scratch);
  }
  for (i32 i = 0; !failed && i < op->num_outputs; ++i)
    call->stack[i] = (u64)call->outputs[i].handle;
}

i32 opwright_has_no_python;

// Sizes that exceed 64 bits wrap in PyTorch, so the reference must not meet them.
static int check_sizes(Call* call) {
  for (i32 i = 0; i < call->op->num_outputs && !call->is_deep; ++i) {
    i64 sizes[kMaxDims + kMaxRank];
    i32 ndim;
    if (output_shape(call, i, sizes, &ndim)) return 1;
  }
  return 0;
}

static int is_alike(const Tensor* one, const Tensor* other) {
  i32 differs = one->ndim != other->ndim || one->dtype != other->dtype;
  for (i64 d = 0; !differs && d < one->ndim; ++d) differs = one->sizes[d] != other->sizes[d];
  return !differs;
}

// Lets the reference compute: for a dtype that the kernel was not instantiated for, beside empty
// outputs, and for tensors of more axes than the glue handles. Arguments are handed on with
// references of their own.
static int call_reference(Call* call) {
  const Operator* op = call->op;
  u64 stack[2 * kMaxArguments];
  for (i32 i = 0; i < op->num_arguments; ++i) {
    const Argument* argument = &op->arguments[i];
    const Value* value = &call->values[i];
    stack[i] = call->stack[i];
    if (argument->kind == kChoice) stack[i] = (u64)value->number;
    if (argument->kind == kTensor && value->count) {
      Handle shared;
      SHIM(call, aoti_torch_new_tensor_handle(value->tensors[0].handle, &shared));
      stack[i] = (u64)shared;
      if (argument->optional) {
        u64* cell = operator_new(sizeof *cell);
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
    FAIL(call,
         opwright_has_no_python ? "%s: the reference failed: it is Python's, and there is none here"
                                : "%s: the reference failed",
         op->name);
  }
  for (i32 i = 0; i < op->num_outputs; ++i) {
    Tensor* t = &call->outputs[i];
    if (!call->gives_out) {
      if (t->handle) aoti_torch_delete_tensor_object(t->handle);
      t->handle = (Handle)stack[i];
      continue;
    }
    Tensor result;
    const i32 failed = inspect(call, &result, (Handle)stack[i]) || !is_alike(t, &result) ||
                       aoti_torch_copy_(t->handle, result.handle, 0);
    aoti_torch_delete_tensor_object((Handle)stack[i]);
    if (failed) FAIL(call, "%s: out has not the shape and dtype of the result", op->name);
  }
  return 0;
}

// True when a kernel would see numbers with fractions as int64, which it sees all families but its
// own as.
static int loses_fractions(const Call* call) {
  const i64 floats = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 15;  // float16, float32, float64, bfloat16
  i64 found = 0;
  for (i32 f = 0; f < call->op->num_families; ++f) {
    if (f != call->op->scalar_family && call->families[f] >= 0)
      found |= floats >> call->families[f] & 1;
  }
  return (int)found;
}

static const Kernel* part_for(const Call* call, const Kernel* kernels) {
  const int is_single = call->op->scalar_family < 0;
  if (call->is_deep || loses_fractions(call)) return 0;
  for (const Kernel* part = kernels; part != kernels + kParts; ++part) {
    if (!part->launch) continue;
    if (is_single || (call->dtype >= 0 && *part->dtypes >> call->dtype & 1)) return part;
  }
  return 0;
}

// Where the kernels were taken back, the contract may be another by now: Python checks the call and
// runs it.
static int hand_over(Call* call) {
  const Handle* outs = (const Handle*)call->stack + call->op->num_arguments;
  for (i32 i = 0; call->gives_out && i < call->op->num_outputs; ++i) {
    if (inspect(call, &call->outputs[i], outs[i])) return 1;
  }
  return opwright_check_written(call) || call_reference(call);
}

static int answer(Call* call, const Kernel* kernels) {
  if (check(call) || (call->gives_out && read_out(call)) || opwright_check_written(call)) return 1;
  const Kernel* kernel = part_for(call, kernels);
  if (!kernel) return call->is_direct || check_sizes(call) || call_reference(call);
  if (!call->gives_out && allocate(call)) return 1;
  const enum Emptiness empty = emptiness(call);
  if (empty == kNoneEmpty) return compute(call, kernel);
  return empty == kSomeEmpty && (call->is_direct || call_reference(call));
}

// The bytes of the UTF-8 character at the start of a text; 0: none is there.
static u64 character_length(const unsigned char* text) {
  const unsigned char lead = text[0], next = lead ? text[1] : 0;
  const u64 bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0x80 ? 2 : 1;
  for (u64 i = 1; i < bytes; ++i) {
    if ((text[i] & 0xC0) != 0x80) return 0;
  }
  const int is_overlong = (lead >= 0x80 && lead < 0xC2) || (lead == 0xE0 && next < 0xA0) ||
                          (lead == 0xF0 && next < 0x90);
  const int is_surrogate = lead == 0xED && next >= 0xA0;
  const int is_beyond = lead > 0xF4 || (lead == 0xF4 && next >= 0x90);
  return is_overlong || is_surrogate || is_beyond ? 0 : bytes;
}

// Python refuses a message that is not valid UTF-8. One that fills its room was cut, perhaps in the
// middle of a character.
static void make_valid(char* text) {
  const int is_cut = __builtin_strlen(text) == kMessage - 1;
  char* const end = text + kMessage - sizeof "...";
  for (u64 bytes; *text; text += bytes) {
    bytes = character_length((unsigned char*)text);
    if (is_cut && text + (bytes ? bytes : 1) > end) {
      __builtin_memcpy(text, "...", sizeof "...");
      return;
    }
    if (!bytes) *text = '?', bytes = 1;
  }
}

// Begins a call: nothing is read or bound yet.
static void clear(const Call* call) {
  const Operator* op = call->op;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    Value* value = &call->values[i];
    value->count = 0, value->tensors = 0, value->views = 0;
  }
  for (i32 i = 0; i < op->num_variables; ++i) call->variables[i] = 0;
  for (i32 i = 0; i < op->num_shapes; ++i) call->shapes[i].length = -1;
  for (i32 i = 0; i < op->num_families; ++i) call->families[i] = -1;
  for (i32 i = 0; i < op->num_outputs; ++i) {
    call->outputs[i].handle = 0, call->outputs[i].copy = 0;
  }
}

enum Outcome opwright_run(const Operator* op, const Kernel* kernels, u64* stack, enum Form form,
                          char* message) {
  char own_message[kMessage];
  Value values[op->num_arguments + 1];
  Tensor tensors[op->num_arguments + 1], outputs[op->num_outputs + 1];
  i64 variables[op->num_variables + 1];
  Shape shapes[op->num_shapes + 1];
  i32 families[op->num_families + 1];
  Call call = {.op = op,
               .stack = stack,
               .values = values,
               .outputs = outputs,
               .variables = variables,
               .shapes = shapes,
               .families = families,
               .gives_out = form == kOut,
               .is_coded = form == kCoded || form == kDirect,
               .is_direct = form == kDirect,
               .message = message ? message : own_message};
  clear(&call);

  call.message[0] = 0;
  const int failed = read(&call, tensors) || (kernels ? answer(&call, kernels) : hand_over(&call));
  release(&call, failed);
  if (failed) make_valid(call.message);
  if (failed && !message) aoti_torch_check(0, op->name, "opwright", 0, own_message);
  return !failed ? kDone : call.has_started ? kFailed : kNotStarted;
}

// ---- services for kernels
// -------------------------------------------------------------------------------------

i64 opwright_chunk_steps;

__attribute__((visibility("default"))) void opwright_set_chunk_steps(i64 steps) {
  opwright_chunk_steps = steps;
}

int opwright_num_threads(void) {
  u32 count = 1;
  return torch_get_num_threads(&count) ? 1 : (int)count;
}

typedef struct {
  void (*body)(i64, i64, void*);
  void* context;
  Call* call;
  i64 begin, end, steps, chunks, threads, arrived;
} Loop;

// A chunk belongs to the call whatever thread it runs on.
static void run_chunk(i64 begin, i64 end, void* context) {
  const Loop* loop = context;
  Call* const before = running;
  running = loop->call;
  loop->body(begin, end, loop->context);
  running = before;
}

// Lets the threads begin at once, or after a millisecond: where one is done before the next has
// woken, no race shows.
static void meet(Loop* loop) {
  enum { kTurns = 2000 };
  __atomic_add_fetch(&loop->arrived, 1, __ATOMIC_RELAXED);
  for (i32 i = 0; i < kTurns; ++i) {
    if (__atomic_load_n(&loop->arrived, __ATOMIC_RELAXED) >= loop->threads) return;
    sched_yield();
  }
}

static void run_small_chunks(i64 first, i64 last, void* context) {
  Loop* loop = context;
  if (last - first < loop->chunks) meet(loop);
  for (i64 i = first; i < last; ++i) {
    const i64 begin = loop->begin + i * loop->steps, left = loop->end - begin;
    run_chunk(begin, left < loop->steps ? loop->end : begin + loop->steps, context);
  }
}

int opwright_parallel_for(i64 begin, i64 end, i64 grain, void (*body)(i64, i64, void*),
                          void* context) {
  const i64 steps = opwright_chunk_steps;
  Loop loop = {body, context, running, begin, end, steps, 0, 0, 0};
  if (!steps) return torch_parallel_for(begin, end, grain, run_chunk, &loop);
  loop.chunks = (end - begin + steps - 1) / steps;
  const i64 threads = opwright_num_threads(), of_one = (loop.chunks + threads - 1) / threads;
  loop.threads = of_one ? (loop.chunks + of_one - 1) / of_one : 0;
  return torch_parallel_for(0, loop.chunks, 1, run_small_chunks, &loop);
}

// PyTorch's threads are OpenMP's. They do not survive a fork, but GNU's OpenMP goes on waiting for
// them in the child. So the thread that forks ends its threads first; its next loop starts new
// ones, here and in the child.
static void end_threads(void) {
  enum { kHard = 2 };
  if (omp_pause_resource_all) omp_pause_resource_all(kHard);
}

// ---- registration
// -----------------------------------------------------------------------------------------------

static Process own, *process = &own;

__attribute__((visibility("default"))) void opwright_share(Process* shared) { process = shared; }

static const Backend* find_backend(const char* name, const Backend* backend) {
  while (backend->name && strcmp(backend->name, name)) ++backend;
  return backend->name ? backend : 0;
}

// Returns the slot that is in use for an operator. The names of its hidden entry differ by schema.
static Slot* find_slot(const Slot* like) {
  Slot* slot = process->slots;
  while (slot && (strcmp(slot->ns, like->ns) || strcmp(slot->key, like->key) ||
                  strcmp(slot->names[kCoded], like->names[kCoded]))) {
    slot = slot->next;
  }
  return slot;
}

// A slot is in use for good, so that its functions may be called as soon as they are registered.
static i32 use_slot(Slot* slot) {
  if (aoti_torch_library_init_impl(slot->ns, slot->key, "opwright", 0, &slot->public)) return 1;
  if (aoti_torch_library_init_impl(slot->ns, slot->key, "opwright", 0, &slot->hidden)) return 1;
  slot->next = process->slots;
  process->slots = slot;
  for (i32 form = 0; form < kForms; ++form) {
    const Handle library = form == kCoded ? slot->hidden : slot->public;
    if (!slot->names[form]) continue;
    if (torch_library_impl(library, slot->names[form], slot->functions[form], TARGET_VERSION))
      return 1;
  }
  return 0;
}

i32 opwright_register_backend(const char* name, const Backend* backends) {
  const Backend* backend = find_backend(name, backends);
  if (!backend) return 1;
  if (!process->watches_forks) process->watches_forks = !pthread_atfork(end_threads, 0, 0);
  for (const Entry* entry = backend->entries; entry != backend->entries + backend->count; ++entry) {
    Slot *used = find_slot(entry->slot), *slot = used ? used : entry->slot;
    __atomic_store_n(&slot->current, entry->version, __ATOMIC_RELEASE);
    if (!used && use_slot(slot)) return 1;
  }
  return 0;
}

i32 opwright_unregister_backend(const char* name, const Backend* backends) {
  const Backend* backend = find_backend(name, backends);
  if (!backend) return 1;
  for (const Entry* entry = backend->entries; entry != backend->entries + backend->count; ++entry) {
    Slot* slot = find_slot(entry->slot);
    if (slot && slot->current == entry->version) {
      __atomic_store_n(&slot->current, entry->taken_back, __ATOMIC_RELEASE);
    }
  }
  return 0;
}

const Slot* opwright_find_slot(const char* name, const char* operator, const Backend* backends) {
  const Backend* backend = find_backend(name, backends);
  for (u64 i = 0; backend && i < backend->count; ++i) {
    const Entry* entry = &backend->entries[i];
    if (!strcmp(entry->version->op->name, operator)) return find_slot(entry->slot);
  }
  return 0;
}

// Takes the public entries of an operator back, before its schema is. No call may run in them.
__attribute__((visibility("default"))) i32 opwright_retire(const char* ns, const char* name) {
  i32 failed = 0;
  for (Slot* slot = process->slots; slot; slot = slot->next) {
    if (!slot->public || strcmp(slot->ns, ns) || strcmp(slot->names[kNamed], name)) continue;
    failed |= aoti_torch_delete_library_object(slot->public);
    slot->public = 0;
  }
  return failed;
}
