// SPDX-License-Identifier: AGPL-3.0-only
// Context switch of the AAPCS64: x19-x30, d8-d15 and the stack pointer.
#if defined(__aarch64__)
    .text
    .globl spark_emu_switch
    .hidden spark_emu_switch
    .type spark_emu_switch, %function
spark_emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size spark_emu_switch, .-spark_emu_switch

    .globl spark_emu_start
    .hidden spark_emu_start
    .type spark_emu_start, %function
spark_emu_start:
    mov x29, xzr
    mov x30, xzr
    bl spark_emu_fibre
    brk #0
    .size spark_emu_start, .-spark_emu_start
#endif
    .section .note.GNU-stack,"",%progbits
