#include <torch/all.h>
