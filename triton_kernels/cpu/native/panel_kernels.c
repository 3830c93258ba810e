/* The tables for use_panel_kernels: that of one type of blocks if TYPE is defined, else those of all types. */
#include "panel_kernels.h"

#if defined(TYPE)
#define KERNELS(NAME) KERNELS_OF(NAME)
#define TABLE(NAME) NAME##_kernels
#define TABLE_OF(NAME) TABLE(NAME)
KERNELS(TYPE)
static const PanelKernels *const tables[NUM_TYPES] = {[TYPE] = &TABLE_OF(TYPE)};
#else
KERNELS_OF(Q4_0) KERNELS_OF(Q4_1) KERNELS_OF(Q5_0) KERNELS_OF(Q5_1) KERNELS_OF(Q8_0) KERNELS_OF(IQ4_NL)
KERNELS_OF(Q2_K) KERNELS_OF(Q3_K) KERNELS_OF(Q4_K) KERNELS_OF(Q5_K) KERNELS_OF(Q6_K) KERNELS_OF(IQ4_XS)
KERNELS_OF(INT4) KERNELS_OF(INT8)
static const PanelKernels *const tables[NUM_TYPES] = {
    &Q4_0_kernels, &Q4_1_kernels, &Q5_0_kernels, &Q5_1_kernels, &Q8_0_kernels, &IQ4_NL_kernels, &Q2_K_kernels,
    &Q3_K_kernels, &Q4_K_kernels, &Q5_K_kernels, &Q6_K_kernels, &IQ4_XS_kernels, &INT4_kernels, &INT8_kernels};
#endif

const PanelKernels *panel_kernels_of(int type) { return tables[type]; }
