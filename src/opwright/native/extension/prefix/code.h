#define OPWRIGHT_WITHOUT_PYTHON
#include <torch/extension.h>
