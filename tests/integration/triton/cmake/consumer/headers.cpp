#include <opwright/kernel.h>

static_assert(sizeof(opwright::half) == 2);
