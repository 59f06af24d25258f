#version 450
// target[i] = subgroup size in the low half, number of subgroups in the high half.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_KHR_shader_subgroup_basic : require

layout(local_size_x_id = 0) in;
layout(buffer_reference, std430) buffer Words { uint at[]; };
layout(push_constant) uniform Push {
    uvec2 target;
} push;

void main() {
    Words(push.target).at[gl_GlobalInvocationID.x] = gl_SubgroupSize | (gl_NumSubgroups << 16);
}
