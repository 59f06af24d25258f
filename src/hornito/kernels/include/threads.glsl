// The threads of a workgroup, those of a subgroup in a row: the specification orders them in no way, but
// subgroups are full.
#ifndef HORNITO_THREADS
#define HORNITO_THREADS

#extension GL_KHR_shader_subgroup_basic : require

uint thread() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }

#endif
