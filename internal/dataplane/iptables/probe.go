package iptables

import (
	"context"
	"fmt"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// chainTry briefly holds the rules that test the kernel's features.
const chainTry = chainPrefix + "TRY"

// The features that only some Services need.
const (
	featureSCTP   = "sctp"
	featureRecent = "recent"
)

// feature is a part of netfilter that a kernel may lack.
type feature struct {
	name  string
	table string
	rule  string
	need  bool
}

func featuresOf(f model.Family) []feature {
	any := &nodeInputs{family: f}
	addr := "192.0.2.1:80"
	if f == model.IPv6 {
		addr = "[2001:db8::1]:80"
	}
	list := []feature{
		{"DNAT", tableNAT, "-p tcp -j DNAT --to-destination " + addr, true},
		{"MASQUERADE --random-fully", tableNAT, "-j MASQUERADE --random-fully", true},
		{"MARK", tableNAT, "-j " + setMark(markRefuse, markMask), true},
		{"statistic", tableNAT, sharesIn(1, 2), true},
		{"addrtype", tableNAT, "-m addrtype --src-type LOCAL", true},
		{"comment", tableNAT, `-m comment --comment "spillway"`, true},
		{featureSCTP, tableNAT, "-p sctp -m sctp --dport 80 -j DNAT --to-destination " + addr, false},
		{featureRecent, tableNAT, "-m recent --rcheck --seconds 1 --reap --name " + chainTry, false},
	}
	for _, c := range any.filterChains() {
		for _, r := range c.rules {
			list = append(list, feature{r, tableFilter, r, true})
		}
	}
	return list
}

// tryFeatures loads a rule of each feature, all at once if the kernel accepts that. It
// returns the optional features that the kernel lacks, and an error that names the
// missing required ones.
func tryFeatures(ctx context.Context, p *programs, f model.Family) (map[string]error, error) {
	all := featuresOf(f)
	err := tryRules(ctx, p, all)
	if err == nil {
		return nil, nil
	}
	lacks, need := map[string]error{}, []string(nil)
	for _, one := range all {
		if one.err(ctx, p) == nil {
			continue
		}
		if one.need {
			need = append(need, one.name)
			continue
		}
		lacks[one.name] = err
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if len(need) > 0 {
		return nil, fmt.Errorf("try out %s: the kernel does not take %s (%w): load the modules, or use another --proxy-mode",
			p.restore, strings.Join(need, ", "), err)
	}
	if len(lacks) == 0 {
		return nil, err // the kernel accepts each alone: the cause is another
	}
	return lacks, nil
}

func (one feature) err(ctx context.Context, p *programs) error {
	return tryRules(ctx, p, []feature{one})
}

// tryRules writes rules into an unreferenced chain, and removes the chain.
func tryRules(ctx context.Context, p *programs, features []feature) error {
	var write, clear []difference
	for _, table := range allTables {
		c := chain{name: chainTry}
		for _, one := range features {
			if one.table == table {
				c.add(one.rule)
			}
		}
		if len(c.rules) > 0 {
			write = append(write, difference{table: table, fill: []chain{c}})
			clear = append(clear, difference{table: table, gone: []string{chainTry}})
		}
	}
	err := p.write(ctx, write...)
	if cleared := p.write(ctx, clear...); err == nil {
		err = cleared
	}
	return err
}
