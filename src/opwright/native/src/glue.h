// The glue between PyTorch's dispatcher and a kernel, driven by tables that are generated from the
// contract. Plain C without a single header, so it compiles in a few hundredths of a second; the
// functions of LibTorch's stable ABI that it uses are declared by hand and resolved when the
// library is loaded into a process that holds torch.
//
// A call goes through the same steps for every operator:
//   read      the dispatcher's stack -> handles, numbers, choices
//   check     dtypes, device, ranks, sizes; binds the named axes
//   allocate  the outputs (or takes those of the out variant)
//   view      pointers, sizes and strides, variadic axes collapsed into one
//   launch    the kernel; on a GPU with its device current, on its current stream
//   finish    copies back, frees, returns or raises
#pragma once

typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef void* Handle;

// ---- LibTorch's stable ABI
// --------------------------------------------------------------------------

typedef void (*BoxedKernel)(u64* stack, u64 num_arguments, u64 num_outputs);

extern i32 aoti_torch_get_dim(Handle, i64*);
extern i32 aoti_torch_get_sizes(Handle, i64**);
extern i32 aoti_torch_get_strides(Handle, i64**);
extern i32 aoti_torch_get_dtype(Handle, i32*);
extern i32 aoti_torch_get_device_type(Handle, i32*);
extern i32 aoti_torch_get_device_index(Handle, i32*);
extern i32 aoti_torch_empty_strided(i64 ndim, const i64* sizes, const i64* strides, i32 dtype,
                                    i32 device_type, i32 device_index, Handle*);
extern i32 aoti_torch_create_tensor_from_blob(void* data, i64 ndim, const i64* sizes,
                                              const i64* strides, i64 offset, i32 dtype,
                                              i32 device_type, i32 device_index, Handle*);
extern i32 aoti_torch__reinterpret_tensor(Handle, i64 ndim, const i64* sizes, const i64* strides,
                                          i64 offset, Handle*);
extern i32 aoti_torch_new_tensor_handle(Handle, Handle*);  // another reference to the same tensor
extern i32 aoti_torch_copy_(Handle self, Handle source, i32 non_blocking);
extern i32 aoti_torch_delete_tensor_object(Handle);
extern i32 torch_get_const_data_ptr(Handle, const void**);
extern i32 torch_get_mutable_data_ptr(Handle, void**);
extern i32 torch_list_size(Handle list, u64*);
extern i32 torch_list_get_item(Handle list, u64 index, u64*);
extern i32 torch_new_list_reserve_size(u64, Handle*);
extern i32 torch_list_push_back(Handle list, u64);
extern i32 torch_delete_list(Handle list);
extern i32 torch_string_length(Handle string, u64*);
extern i32 torch_string_c_str(Handle string, const char**);
extern i32 torch_delete_string(Handle string);
extern i32 torch_parallel_for(i64 begin, i64 end, i64 grain, void (*)(i64, i64, void*), void*);
extern i32 torch_get_num_threads(u32*);
extern int sched_yield(void);
extern i32 torch_call_dispatcher(const char* name, const char* overload, u64* stack, u64 version);
extern i32 torch_library_impl(Handle library, const char* name, BoxedKernel, u64 version);
extern i32 aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, u32 line,
                                        Handle*);
extern i32 aoti_torch_library_init_fragment(const char* ns, const char* file, u32 line, Handle*);
extern i32 aoti_torch_library_def(Handle library, const char* schema);
extern i32 aoti_torch_delete_library_object(Handle);
extern void aoti_torch_check(_Bool claim, const char* function, const char* file, u32 line,
                             const char* message);

// In libtorch_cuda, which a CPU build of torch does not have: weak, so that the library loads there
// too and its CPU kernels run.
extern i32 aoti_torch_create_cuda_guard(i32 device_index, Handle*) __attribute__((weak));
extern i32 aoti_torch_delete_cuda_guard(Handle) __attribute__((weak));
extern i32 aoti_torch_get_current_cuda_stream(i32 device_index, void**) __attribute__((weak));

// Since torch 2.13.
extern const char* torch_exception_get_what_without_backtrace(void) __attribute__((weak));
// For the arguments that the dispatcher's ABI cannot pass: AOTInductor's functions for these
// operators.
typedef i32 ScaledSum(Handle out, Handle self, Handle left, Handle right, double beta,
                      double alpha);
extern ScaledSum aoti_torch_cpu_addmm_out __attribute__((weak));
extern ScaledSum aoti_torch_cpu_baddbmm_out __attribute__((weak));
extern ScaledSum aoti_torch_cuda_addmm_out __attribute__((weak));
extern ScaledSum aoti_torch_cuda_baddbmm_out __attribute__((weak));

#define TARGET_VERSION ((2ULL << 56) | (11ULL << 48))  // the least torch: 2.11

// ---- libc and the C++ run time
// ------------------------------------------------------------------------

typedef __SIZE_TYPE__ Size;
extern int snprintf(char*, Size, const char*, ...);
extern void* malloc(Size);
extern void free(void*);
extern void qsort(void*, Size count, Size size, int (*compare)(const void*, const void*));
extern int strcmp(const char*, const char*);
extern int strncmp(const char*, const char*, Size);
extern Size strlen(const char*);
extern int pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));
extern i32 omp_pause_resource_all(i32 kind)
    __attribute__((weak));  // of the OpenMP that libtorch brings
// `operator delete`: libtorch hands an optional over in a cell that it made with `new`.
extern void* operator_new(Size) __asm__("_Znwm");
extern void operator_delete(void*) __asm__("_ZdlPv");

// ---- tables
// -------------------------------------------------------------------------------------------

enum { kMaxRank = 16, kMaxDims = 64, kMaxArguments = 64, kMessage = 512 };
enum { kUInt8 = 0, kCuda = 1 };  // PyTorch's numbers of a scalar type and of a device type

// One axis of a tensor. `variable` indexes the sizes that a call binds; `value` computes from them.
enum AxisKind { kNamedAxis, kFixed, kComputed, kVariadic, kAnonymous };
typedef struct {
  enum AxisKind kind;
  const char* text;  // as written, for messages
  i64 size;          // kFixed
  i32 variable;      // kNamedAxis; kVariadic: index of the bound shape, -1 when it has no name
  i64 (*value)(const i64*,
               i32* has_none);    // kComputed; sets `has_none` where there is no such size
  i32 solves;                     // kComputed: the variable that only this axis can bind, else -1
  i64 (*solve)(const i64*, i64);  // kComputed with solves: its value, -1 when there is none
  u64 needs;                      // kComputed: mask of the variables it reads, without `solves`
  u64 switches;                   // kComputed: mask of the int arguments it reads
} Axis;

typedef struct {
  i32 rank;  // dimensions of the kernel's View
  const Axis* axes;
  u64 dtypes;        // mask of PyTorch's scalar type numbers
  i32 family;        // tensors of one family share a dtype; -1 for a single dtype
  i32 kernel_dtype;  // the dtype that the kernel sees; -1: the one of the call
} TensorType;

enum ArgumentKind { kTensor, kTensorList, kInt, kFloat, kBool, kChoice };
typedef struct {
  const char* name;
  enum ArgumentKind kind;
  TensorType type;
  i32 optional, mutated;
  i32 variable;                // kInt: the size variable of its name, else -1
  const char* const* choices;  // kChoice: their names, then null
} Argument;

typedef struct {
  const char* name;
  TensorType type;
  i32 gradient_of;  // the optional argument whose absence leaves this output empty, else -1
} Output;

typedef const char* (*Launcher)(i32 dtype, void** arguments);

typedef struct {
  const char* name;
  const char* reference;  // the operator that runs the reference, for dtypes without a kernel
  i32 num_arguments, num_outputs, num_variables, num_shapes, num_families;
  const Argument* arguments;
  const Output* outputs;
  i32 scalar_family;  // the family of the kernel's template parameter, -1 when it has none
} Operator;

// A kernel comes in two parts, by the dtypes that they were instantiated for; a part may be
// missing.
enum { kParts = 2 };
typedef struct {
  Launcher launch;
  const u64* dtypes;  // mask of scalar types
} Kernel;

// ---- one call
// -------------------------------------------------------------------------------------------

typedef struct {
  Handle handle;
  i64 ndim;
  i64 *sizes, *strides;
  i32 dtype;
  Handle copy;                 // what the kernel sees in place of `handle`, if anything
  i32 is_shared;               // `out` lies on an argument that the kernel reads
  u64 view[1 + 2 * kMaxRank];  // a View<T, R>: data, sizes, strides
} Tensor;

typedef struct {
  i64 number;       // kInt, kBool, kChoice
  double real;      // kFloat
  Tensor* tensors;  // kTensor, kTensorList
  i64 count;
  void* views;  // kTensorList: array of View
  struct {
    const void* data;
    i64 size;
  } list;  // a List<View<T, R>>
} Value;

typedef struct {
  i32 length;
  const i64* sizes;
} Shape;

// Arithmetic of computed axes, in 128 bits, so that what one step takes too far the next may bring
// back.
typedef __int128 Wide;
static inline Wide plus(Wide a, Wide b, i32* has_none) {
  *has_none |= __builtin_add_overflow(a, b, &a);
  return a;
}
static inline Wide minus(Wide a, Wide b, i32* has_none) {
  *has_none |= __builtin_sub_overflow(a, b, &a);
  return a;
}
static inline Wide times(Wide a, Wide b, i32* has_none) {
  *has_none |= __builtin_mul_overflow(a, b, &a);
  return a;
}
// As Python's // and %: rounded down.
static inline Wide floor_divide(Wide a, Wide b, i32* has_none) {
  if (b == -1) return minus(0, a, has_none);
  *has_none |= !b;
  return b ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0;
}
static inline Wide floor_modulo(Wide a, Wide b, i32* has_none) {
  return minus(a, times(floor_divide(a, b, has_none), b, has_none), has_none);
}
static inline Wide least(Wide a, Wide b) { return a < b ? a : b; }
static inline Wide most(Wide a, Wide b) { return a > b ? a : b; }
static inline i64 narrow(Wide value, i32* has_none) {
  *has_none |= value != (i64)value;
  return (i64)value;
}

// ---- what glue.c offers to the generated source
// -----------------------------------------------------------

// How a call comes from the dispatcher: with choices by name; the same, and the tensors to write
// into at the end of the stack; with choices by number. And directly from Python: as kCoded, but
// the caller keeps the tensors, and optional ones are handles without a cell.
enum Form { kNamed, kOut, kCoded, kForms, kDirect };
// kFailed: in the kernel, or when its results were copied.
enum Outcome { kDone, kNotStarted, kFailed };
// One call. The kernel is given by its parts. Null: the kernels were taken back, so Python runs the
// call, by what is declared now. A failure is raised, or written into `message` if there is one,
// which has kMessage bytes; then nothing is done that the kernel cannot do by itself.
extern enum Outcome opwright_run(const Operator*, const Kernel*, u64* stack, enum Form,
                                 char* message);

// The kernels that one library has for an operator.
typedef struct {
  enum Outcome (*run)(const Operator*, const Kernel*, u64* stack, enum Form, char* message);
  const Operator* op;
  const Kernel* kernels;
} Version;

// What the dispatcher calls for an operator on one kind of device. PyTorch cannot change a
// registration while other threads call it. So the first library with kernels registers functions
// that read `current`, for the life of the process, and each later one only stores its version
// there. No library is ever unloaded: a call that is still in an old version ends well.
typedef struct Slot {
  const Version* current;
  const char *ns, *key;  // "my_ops", "CUDA"
  const char*
      names[kForms];  // with the overload: "bias_gelu.out"; null where there is no such form
  BoxedKernel functions[kForms];
  Handle public, hidden;  // what holds the registrations: of kNamed and kOut, of kCoded
  struct Slot* next;
} Slot;

static inline void run_current(const Slot* slot, u64* stack, enum Form form) {
  const Version* version = __atomic_load_n(&slot->current, __ATOMIC_ACQUIRE);
  version->run(version->op, version->kernels, stack, form, 0);
}

typedef struct {
  Slot* slot;  // in use if this library was the first
  const Version *version, *taken_back;
} Entry;

// The kernels of one backend.
typedef struct {
  const char* name;  // "cuda", "cpu_v3"
  const Entry* entries;
  u64 count;
} Backend;

// The most steps of a chunk of `parallel_for`; 0: as many as suit the threads.
extern i64 opwright_chunk_steps;
extern void opwright_set_chunk_steps(i64);

// What the libraries of a process share, once `opwright_share` was called for each. All zero at
// first.
typedef struct {
  Slot* slots;
  i32 watches_forks;
} Process;

// Makes the kernels of a backend the current ones, and takes them back where they still are. Zero
// on success. The list ends with a backend without a name. Calls may run at the same time, other
// registrations may not.
extern i32 opwright_register_backend(const char* backend, const Backend*);
extern i32 opwright_unregister_backend(const char* backend, const Backend*);
// Returns what holds the kernels of an operator; null where the backend has none.
extern const Slot* opwright_find_slot(const char* backend, const char* operator, const Backend*);
// Set where a program without Python has defined the operators.
extern i32 opwright_has_no_python;
