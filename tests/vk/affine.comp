#version 450
// target[i] = source[i] * 3 + ADD for i < count, repeated ROUNDS times on the running value.
// One thread per element. Push constants: source address, target address, count.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ADD = 1;
layout(constant_id = 2) const uint ROUNDS = 1;

layout(buffer_reference, std430) buffer Words { uint at[]; };
layout(push_constant) uniform Push {
    uvec2 source;
    uvec2 target;
    uint count;
} push;

void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i >= push.count) {
        return;
    }
    uint value = Words(push.source).at[i];
    for (uint round = 0; round < ROUNDS; ++round) {
        value = value * 3u + ADD;
    }
    Words(push.target).at[i] = value;
}
