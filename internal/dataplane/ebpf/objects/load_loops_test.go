package objects

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf/asm"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// TestLoopsOfOldVerifiers: before Linux 6.4, check_cfg of kernel/bpf/verifier.c takes a loop for an
// endless one if the instruction before its head falls through into it, and a jump has led to
// the head before. Compilers make such loops now and then.
func TestLoopsOfOldVerifiers(t *testing.T) {
	cfg := Config{FlowTableSize: 1000, MaxFrontends: 100, MaxEndpoints: 200, XDP: XDPAuto}
	all, err := Specs(&cfg, kernel.Features{})
	must.Do(t, err)
	programs := 0
	for _, spec := range all {
		for name, p := range spec.Programs {
			programs++
			if err := explore(p.Instructions); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if programs < 14 {
		t.Errorf("only %d programs", programs)
	}
	loop := asm.Instructions{
		asm.Mov.Imm(asm.R0, 8),
		asm.Ja.Label("body"),
		asm.Sub.Imm(asm.R0, 1).WithSymbol("head"),
		asm.Mov.Reg(asm.R1, asm.R0), // falls through
		asm.JEq.Imm(asm.R0, 1, "exit").WithSymbol("body"),
		asm.Ja.Label("head"),
		asm.Return().WithSymbol("exit"),
	}
	if err := explore(loop); err == nil {
		t.Error("a loop that Linux 6.1 refuses is not found")
	}
}

// block is an instruction with those that may follow, in the order in which check_cfg takes them.
type block struct {
	next   []int
	loopOK []bool
}

// explore does what check_cfg of Linux 6.1 does with the instructions of a program.
func explore(code asm.Instructions) error {
	blocks, err := flow(code)
	if err != nil {
		return err
	}
	const discovered, explored = 1, 2
	state, taken := make([]int, len(blocks)), make([]int, len(blocks))
	stack := []int{0}
	state[0] = discovered
	for len(stack) > 0 {
		at := stack[len(stack)-1]
		b := blocks[at]
		if taken[at] == len(b.next) {
			state[at] = explored
			stack = stack[:len(stack)-1]
			continue
		}
		next, loopOK := b.next[taken[at]], b.loopOK[taken[at]]
		taken[at]++
		switch {
		case state[next] == 0:
			state[next] = discovered
			stack = append(stack, next)
		case state[next] == discovered && !loopOK:
			return fmt.Errorf("back-edge from instruction %d to %d (%v)", at, next, code[next])
		}
	}
	return nil
}

// flow finds the instructions that may follow each.
func flow(code asm.Instructions) ([]block, error) {
	symbols, raw, at := map[string]int{}, map[int]int{}, make([]int, len(code))
	for i, offset := 0, 0; i < len(code); i++ {
		if s := code[i].Symbol(); s != "" {
			symbols[s] = i
		}
		raw[offset], at[i] = i, offset
		offset++
		if code[i].OpCode.IsDWordLoad() {
			offset++
		}
	}
	blocks := make([]block, len(code))
	for i, ins := range code {
		add := func(next int, loopOK bool) {
			blocks[i].next, blocks[i].loopOK = append(blocks[i].next, next), append(blocks[i].loopOK, loopOK)
		}
		op := ins.OpCode.JumpOp()
		jump := op != asm.InvalidJumpOp && op != asm.Exit && op != asm.Call
		to := raw[at[i]+1+int(ins.Offset)]
		if ref := ins.Reference(); ref != "" && (jump || ins.IsFunctionCall()) {
			var ok bool
			if to, ok = symbols[ref]; !ok {
				return nil, fmt.Errorf("no symbol %s", ref)
			}
		}
		switch {
		case op == asm.Exit:
		case op == asm.Ja:
			add(to, true)
		case jump:
			add(i+1, true)
			add(to, true)
		case ins.IsFunctionCall():
			add(i+1, false)
			add(to, true)
		default:
			add(i+1, false)
		}
	}
	return blocks, nil
}
