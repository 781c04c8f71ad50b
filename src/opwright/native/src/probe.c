// A call of the glue up to one of its steps, again and again: for `opwright bench --call`, which
// takes the difference between one step and the next. The steps are those of glue.c, compiled with
// it as one unit.
#include "glue.c"

// Up to which step a call goes. What a step needs is always given back, as in a call.
enum ProbedStep { kStack, kRead, kCheck, kAllocate, kView, kEmptyLaunch, kWholeCall };

static const char* launch_nothing(i32 dtype, void** arguments) { return 0; }

// Puts the arguments on the stack as a direct call does, and lists as the dispatcher does: these
// are given as their length and their handles.
static int make_stack(const Operator* op, const u64* given, u64* stack) {
  for (i32 i = 0; i < op->num_arguments; ++i) {
    stack[i] = given[i];
    if (op->arguments[i].kind != kTensorList) continue;
    const u64* list = (const u64*)given[i];
    Handle made;
    if (torch_new_list_reserve_size(list[0], &made)) return 1;
    for (u64 k = 0; k < list[0]; ++k) {
      Handle shared;
      if (aoti_torch_new_tensor_handle((Handle)list[1 + k], &shared)) return 1;
      if (torch_list_push_back(made, (u64)shared)) return 1;
    }
    stack[i] = (u64)made;
  }
  return 0;
}

static int probe_once(const Operator* op, const Kernel* kernels, const u64* given,
                      enum ProbedStep last, char* message) {
  u64 stack[2 * kMaxArguments];
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
               .is_coded = 1,
               .is_direct = 1,
               .message = message};
  clear(&call);
  if (make_stack(op, given, stack))
    FAIL(&call, "%s: its arguments cannot be handed over", op->name);

  void* arguments[2 * kMaxArguments + 1];
  const Kernel nothing = {launch_nothing, 0};
  const Kernel* kernel = 0;
  int failed = last >= kRead && read(&call, tensors);
  if (!failed && last >= kCheck) {
    failed = check(&call) || opwright_check_written(&call);
    kernel = failed ? 0 : part_for(&call, kernels);
    if (!failed && !kernel) {
      snprintf(message, kMessage, "%s: there is no kernel for this dtype", op->name);
      failed = 1;
    }
  }
  if (!failed && last >= kAllocate) failed = allocate(&call);
  if (!failed && last >= kView) failed = make_views(&call, arguments);
  if (!failed && last >= kEmptyLaunch) {
    failed = launch(&call, last == kWholeCall ? kernel : &nothing, arguments) || copy_back(&call);
  }
  release(&call, failed);
  for (i32 i = 0; !failed && i < op->num_outputs; ++i) {
    if (stack[i]) aoti_torch_delete_tensor_object((Handle)stack[i]);
  }
  return failed;
}

// Calls so many times up to a step. Returns what is wrong, or null.
static inline const char* probe(const Operator* op, const Kernel* kernels, const u64* given,
                                i32 last, i64 count) {
  static char message[kMessage];
  for (i64 i = 0; i < count; ++i) {
    if (probe_once(op, kernels, given, (enum ProbedStep)last, message)) return message;
  }
  return 0;
}
