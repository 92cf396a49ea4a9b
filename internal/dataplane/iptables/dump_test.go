package iptables

import (
	"bytes"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// BenchmarkReadDump reads the table nat of 5,000 Services with 10 endpoints each, 55,000
// rules.
//
//	go test ./internal/dataplane/iptables -run XXX -bench ReadDump -benchmem
func BenchmarkReadDump(b *testing.B) {
	s := manyServices(5000, 10)
	r := newRuleset(newNodeInputs(model.IPv4, s.Node, false))
	r.apply(s.Ports, nil)
	d := difference{table: tableNAT}
	for c := range r.chains(tableNAT) {
		d.fill = append(d.fill, c)
	}
	var saved bytes.Buffer
	d.writeTo(&saved)
	b.SetBytes(int64(saved.Len()))
	for b.Loop() {
		dumps, err := readDump(bytes.NewReader(saved.Bytes()), func(_, rule string) { parseComment(rule, model.IPv4) })
		if err != nil || len(dumps[0].chains) != len(d.fill) {
			b.Fatalf("%d chains of %d, %v", len(dumps[0].chains), len(d.fill), err)
		}
	}
	b.ReportMetric(float64(d.rules()), "rules")
}
