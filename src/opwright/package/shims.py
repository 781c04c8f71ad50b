"""Since which torch its stable ABI has which function, as the guards in the headers of torch 2.14 and 2.15 say."""

from __future__ import annotations

from opwright.build.elf import SharedLibrary

_SINCE = {
    (2, 10): """
        torch_c10_cuda_check_msg torch_c10_cuda_free_error_msg torch_call_dispatcher
        torch_cuda_stream_synchronize torch_delete_list torch_delete_string torch_get_const_data_ptr
        torch_get_cuda_stream_from_pool torch_get_current_cuda_blas_handle torch_get_mutable_data_ptr
        torch_get_num_threads torch_get_thread_idx torch_library_impl torch_list_get_item torch_list_push_back
        torch_list_set_item torch_list_size torch_new_list_reserve_size torch_new_string_handle
        torch_parallel_for torch_parse_device_string torch_set_current_cuda_stream torch_set_requires_grad
        torch_string_c_str torch_string_length
    """,
    (2, 11): """
        torch_dtype_float4_e2m1fn_x2 torch_dtype_float8_e8m0fnu torch_from_blob
    """,
    (2, 12): """
        aoti_torch_dtype_float4_e2m1fn_x2 aoti_torch_dtype_float8_e8m0fnu torch_library_def_with_tags
        torch_tag_core torch_tag_cudagraph_unsafe torch_tag_data_dependent_output torch_tag_dynamic_output_shape
        torch_tag_flexible_layout torch_tag_generated torch_tag_inplace_view
        torch_tag_maybe_aliasing_or_mutating torch_tag_needs_contiguous_strides torch_tag_needs_exact_strides
        torch_tag_needs_fixed_stride_order torch_tag_nondeterministic_bitwise torch_tag_nondeterministic_seeded
        torch_tag_out_variant torch_tag_pointwise torch_tag_pt2_compliant_tag torch_tag_reduction
        torch_tag_view_copy
    """,
    (2, 13): """
        torch_delete_generator torch_delete_stable_ivalue torch_exception_get_what
        torch_exception_get_what_without_backtrace torch_generator_get_device torch_library_set_python_module
        torch_new_generator_handle torch_new_stable_ivalue torch_stream_native_handle
    """,
    (2, 14): """
        torch_has_storage torch_mps_set_arg_bytes torch_tensor_from_pyobject torch_tensor_to_pyobject
    """,
    (2, 15): """
        torch_device_from_pyobject torch_device_to_pyobject torch_dtype_from_pyobject torch_dtype_to_pyobject
        torch_is_tensor_pyobject
    """,
}
_VERSIONS = {name: version for version, names in _SINCE.items() for name in names.split()}


def minimum_torch(library: SharedLibrary) -> tuple[int, int] | None:
    """Returns the first torch that has all that a library needs of it; None if that is older than the oldest guard.

    A library runs without its weak symbols.
    """
    needed = (s.name for s in library.undefined if not s.is_weak)
    return max((_VERSIONS[name] for name in needed if name in _VERSIONS), default=None)
