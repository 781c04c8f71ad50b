// Stands in for the header of cuRAND that clang's CUDA mode includes in every source. A toolkit
// without cuRAND, as Python's packages give it, lacks it, and clang would stop at the first line.
#pragma once
