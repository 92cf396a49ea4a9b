package ruleset

import (
	"bytes"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"spillway.dev/spillway/internal/node/iptablessave"
)

// anyTable accepts every table.
func anyTable(string) bool { return true }

// parseSave parses the tables of iptables-save's output that take accepts, and returns
// their names.
func (rs *Ruleset) parseSave(command, family string, out []byte, take func(table string) bool) (tables []string, err error) {
	wanted := false
	for line, err := range iptablessave.Lines(bytes.NewReader(out)) {
		if err != nil {
			return tables, err
		}
		if line.Kind == iptablessave.Table {
			if wanted = take(line.Table); wanted {
				tables = append(tables, line.Table)
			}
		}
		switch {
		case !wanted:
		case line.Kind == iptablessave.Chain:
			c := rs.chain(command, family, line.Table, line.Chain)
			c.Base, c.Policy = !strings.HasPrefix(line.Policy, "-"), line.Policy
		case line.Kind == iptablessave.Rule:
			c := rs.chain(command, family, line.Table, line.Chain)
			rs.add(c, len(c.Rules)+1, line.Rule)
		}
	}
	return tables, nil
}

// foreignTable matches the remark of iptables-nft-save about a table that it does not
// understand. It then omits the table or a part of it, and still succeeds:
//
//	# Table `filter' is incompatible, use 'nft' tool.
//	# Table `nat' contains incompatible base-chains, use 'nft' tool to list them.
//
// Wording and quotes differ between versions. Older versions also print it for tables
// that are not of iptables.
var foreignTable = regexp.MustCompile("(?im)^# table(?:\\s+[`'\"]([^`'\"\n]+)[`'\"])?.*incompatible")

// incompatible returns a test for tables that iptables-nft-save did not print in full:
// every table, if a remark names none.
func incompatible(out []byte) func(table string) bool {
	named := map[string]bool{}
	for _, m := range foreignTable.FindAllSubmatch(out, -1) {
		if len(m[1]) == 0 {
			return anyTable
		}
		named[string(m[1])] = true
	}
	return func(table string) bool { return named[table] }
}

// parseNFT parses the output of "nft -a list ruleset" without the known tables ("FAMILY
// NAME"). It returns the tables whose rules nft does not show in full, because they use
// extensions of iptables.
func (rs *Ruleset) parseNFT(out []byte, known map[string]bool) (hidden []string) {
	p := nftParser{rs: rs, known: known}
	for line := range strings.Lines(string(out)) {
		p.line(strings.TrimSpace(line))
	}
	return p.hidden
}

// extension matches an iptables extension that this build of nft cannot translate.
var extension = regexp.MustCompile(`(^| )xt (target|match) `)

// nftParser parses a listing line by line. Only elements share a line.
type nftParser struct {
	rs            *Ruleset
	known         map[string]bool
	family, table string
	skip          bool
	chain         *Chain // the chain or map of the current line
	isMap         bool
	elements      bool // the line is in the list of elements of a map
	hidden        []string
}

func (p *nftParser) line(line string) {
	text, handle := cutHandle(line)
	fields := strings.Fields(text)
	switch {
	case len(fields) == 0:
	case fields[0] == "table" && len(fields) == 4 && fields[3] == "{":
		p.family, p.table = fields[1], fields[2]
		p.skip = p.known[p.family+" "+p.table]
	case p.skip:
	case p.chain == nil && len(fields) == 3 && fields[2] == "{":
		p.open(fields[0], fields[1])
	case p.chain == nil:
	case p.isMap:
		p.mapLine(text)
	case text == "}":
		p.chain = nil
	case fields[0] == "type" && strings.Contains(text, " hook "):
		p.chain.Base = true
		p.chain.Type, p.chain.Hook, p.chain.Priority = fields[1], word(fields, "hook"), priority(text)
		p.chain.Policy = strings.TrimSuffix(word(fields, "policy"), ";")
	case handle != 0:
		p.rs.add(p.chain, handle, named(text))
		r := p.chain.Rules[len(p.chain.Rules)-1]
		if table := p.family + " " + p.table; extension.MatchString(r.withoutComment()) && !slices.Contains(p.hidden, table) {
			p.hidden = append(p.hidden, table)
		}
	}
}

// open starts a chain, or a map or set, which becomes a chain of its elements. Other
// objects are ignored.
func (p *nftParser) open(kind, name string) {
	switch kind {
	case "chain":
		p.chain, p.isMap = p.rs.chain("nft", p.family, p.table, name), false
	case "map", "set":
		p.chain, p.isMap = p.rs.chain("nft", p.family, p.table, "@"+name), true
	}
}

func (p *nftParser) mapLine(text string) {
	if !p.elements {
		rest, ok := strings.CutPrefix(text, "elements = {")
		if !ok {
			if text == "}" {
				p.chain = nil
			}
			return
		}
		p.elements, text = true, rest
	}
	rest, last := strings.CutSuffix(strings.TrimSpace(text), "}")
	for _, element := range splitElements(rest) {
		if element = strings.TrimSpace(element); element != "" {
			p.rs.add(p.chain, 0, named(element))
		}
	}
	if last {
		p.elements = false
	}
}

// numbers matches protocols as nft prints them without /etc/protocols, as in small
// images.
var numbers = regexp.MustCompile(`l4proto (6|17)( |$)|(^| \. )(6|17) \. `)

// named replaces protocol numbers by names.
func named(text string) string {
	return numbers.ReplaceAllStringFunc(text, func(s string) string {
		return strings.Replace(strings.Replace(s, "17", "udp", 1), "6", "tcp", 1)
	})
}

// splitElements splits at commas that are not in quotes.
func splitElements(s string) []string {
	if !strings.Contains(s, `"`) {
		return strings.Split(s, ",")
	}
	inQuotes := false
	return strings.FieldsFunc(s, func(r rune) bool {
		if r == '"' {
			inQuotes = !inQuotes
		}
		return r == ',' && !inQuotes
	})
}

// cutHandle splits off the "# handle 7" that nft -a appends.
func cutHandle(line string) (text string, handle int) {
	i := strings.LastIndex(line, " # handle ")
	if i < 0 {
		return line, 0
	}
	handle, err := strconv.Atoi(line[i+len(" # handle "):])
	if err != nil {
		return line, 0
	}
	return strings.TrimSpace(line[:i]), handle
}

// word returns the field behind a name.
func word(fields []string, name string) string {
	if i := slices.Index(fields, name); i >= 0 && i+1 < len(fields) {
		return fields[i+1]
	}
	return ""
}

// priorities are the names of nft for priorities.
var priorities = map[string]int{"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}

var priorityText = regexp.MustCompile(`priority (-?\d+|[a-z]+)(?: ([+-]) (\d+))?;`)

// priority returns the priority in the first line of a base chain: "priority srcnat - 1;".
func priority(text string) int {
	m := priorityText.FindStringSubmatch(text)
	if m == nil {
		return 0
	}
	n, known := priorities[m[1]]
	if !known {
		n, _ = strconv.Atoi(m[1])
	}
	d, _ := strconv.Atoi(m[3])
	if m[2] == "-" {
		d = -d
	}
	return n + d
}
