// SPDX-License-Identifier: AGPL-3.0-only
// Context switch of the System V x86-64 ABI: six callee-saved registers and the stack pointer. Kernels leave MXCSR and
// the x87 control word alone, so these are not saved.
#if defined(__x86_64__)
    .text
    .globl spark_emu_switch
    .hidden spark_emu_switch
    .type spark_emu_switch, @function
spark_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size spark_emu_switch, .-spark_emu_switch

    .globl spark_emu_start
    .hidden spark_emu_start
    .type spark_emu_start, @function
spark_emu_start:
    .cfi_startproc
    .cfi_undefined rip
    xorl %ebp, %ebp
    call spark_emu_fibre
    ud2
    .cfi_endproc
    .size spark_emu_start, .-spark_emu_start
#endif
    .section .note.GNU-stack,"",@progbits
