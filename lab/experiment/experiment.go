// Package experiment compares two operations on a machine that is never quite idle. It
// measures both in turn, A B B A A B B A ..., and uses the ratio within each round. A
// drift of the machine over minutes affects both sides alike and cancels out. The rest
// shows in the range of the ratios, and in an A/A control that compares a side with
// itself.
package experiment

import (
	"context"
	"errors"
	"fmt"
)

// Arm measures one side once.
type Arm[T any] func(context.Context) (T, error)

// Pair is two sides to compare. A is the base of the ratios.
type Pair[T any] struct {
	Name   string
	A, B   Arm[T]
	Rounds int
	// Progress, if set, is called before each measurement with its number and
	// the number of all, and after the last one with both equal.
	Progress func(done, total int)
}

// Control returns the pair that compares A with itself. On a perfectly idle machine its
// ratios would all be 1. A real difference must exceed their range.
func (p Pair[T]) Control() Pair[T] {
	p.Name += " (A/A control)"
	p.B = p.A
	return p
}

// Trial holds the measurements of a Pair: A[i] and B[i] belong to round i.
type Trial[T any] struct {
	Name string `json:"name"`
	A    []T    `json:"a"`
	B    []T    `json:"b"`
}

// Run measures the pair. A round measures each side once; every other round
// begins with B. On an error, or when ctx ends, the rounds that were complete
// are returned together with the error.
func (p Pair[T]) Run(ctx context.Context) (Trial[T], error) {
	t := Trial[T]{Name: p.Name}
	if p.Rounds < 1 {
		return t, fmt.Errorf("run %s: %d rounds: at least 1 is needed", p.Name, p.Rounds)
	}
	if p.A == nil || p.B == nil {
		return t, fmt.Errorf("run %s: %w", p.Name, errors.New("a side is missing"))
	}
	for round := range p.Rounds {
		a, b, err := p.round(ctx, round)
		if err != nil {
			return t, fmt.Errorf("run %s: round %d: %w", p.Name, round+1, err)
		}
		t.A, t.B = append(t.A, a), append(t.B, b)
	}
	p.progress(2 * p.Rounds)
	return t, nil
}

func (p Pair[T]) round(ctx context.Context, round int) (a, b T, err error) {
	arms := []Arm[T]{p.A, p.B}
	results := []*T{&a, &b}
	first := round % 2
	for i, side := range []int{first, 1 - first} {
		if err := ctx.Err(); err != nil {
			return a, b, err
		}
		p.progress(2*round + i)
		if *results[side], err = arms[side](ctx); err != nil {
			return a, b, fmt.Errorf("side %c: %w", "AB"[side], err)
		}
	}
	return a, b, nil
}

func (p Pair[T]) progress(done int) {
	if p.Progress != nil {
		p.Progress(done, 2*p.Rounds)
	}
}

// Ratio compares one figure of both sides, B ÷ A, round by round. Rounds in
// which A's figure is 0 have no ratio and are left out.
func (t Trial[T]) Ratio(figure func(T) float64) Summary {
	var ratios []float64
	for i := range t.A {
		if a := figure(t.A[i]); a != 0 {
			ratios = append(ratios, figure(t.B[i])/a)
		}
	}
	return Summarize(ratios)
}

// Figures returns one figure of each measurement of a side.
func Figures[T any](side []T, figure func(T) float64) []float64 {
	out := make([]float64, len(side))
	for i, v := range side {
		out[i] = figure(v)
	}
	return out
}
