package ruleset

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// anyTable takes all tables.
func anyTable(string) bool { return true }

// parseSave reads what iptables-save prints of the tables that take wants, and
// returns the names of those that it printed.
func (rs *Ruleset) parseSave(command, family string, out []byte, take func(table string) bool) (tables []string) {
	table, wanted := "", false
	for line := range strings.Lines(string(out)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
			if wanted = take(table); wanted {
				tables = append(tables, table)
			}
		case !wanted:
		case strings.HasPrefix(line, ":"):
			name, policy, _ := strings.Cut(line[1:], " ")
			rs.chain(command, family, table, name).Base = !strings.HasPrefix(policy, "-")
		case strings.HasPrefix(line, "-A "):
			name, text, _ := strings.Cut(line[3:], " ")
			c := rs.chain(command, family, table, name)
			rs.add(c, len(c.Rules)+1, text)
		}
	}
	return tables
}

// foreignTable is what iptables-nft-save says of a table in which it does not
// understand everything, before it prints nothing of it or a part, and succeeds:
//
//	# Table `filter' is incompatible, use 'nft' tool.
//	# Table `nat' contains incompatible base-chains, use 'nft' tool to list them.
//
// Words and quotes differ with the version; older ones say it of tables that are
// not of iptables, too.
var foreignTable = regexp.MustCompile("(?im)^# table(?:\\s+[`'\"]([^`'\"\n]+)[`'\"])?.*incompatible")

// incompatible tells the tables that iptables-nft-save has not printed whole: all
// if a remark names none.
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

// parseNFT reads what "nft -a list ruleset" prints, without the tables that are
// known already ("FAMILY NAME"). It returns the tables in which nft does not
// show what rules do, since extensions of iptables do it.
func (rs *Ruleset) parseNFT(out []byte, known map[string]bool) (hidden []string) {
	p := nftParser{rs: rs, known: known}
	for line := range strings.Lines(string(out)) {
		p.line(strings.TrimSpace(line))
	}
	return p.hidden
}

// extension is how nft shows one that it was built without words for.
var extension = regexp.MustCompile(`(^| )xt (target|match) `)

// nftParser goes through a listing, in which each thing has a line of its own
// but for elements.
type nftParser struct {
	rs            *Ruleset
	known         map[string]bool
	family, table string
	skip          bool
	chain         *Chain // that the line is in, or the map
	isMap         bool
	elements      bool // in the list of elements of a map
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
	case handle != 0:
		p.rs.add(p.chain, handle, named(text))
		r := p.chain.Rules[len(p.chain.Rules)-1]
		if table := p.family + " " + p.table; extension.MatchString(r.bare()) && !slices.Contains(p.hidden, table) {
			p.hidden = append(p.hidden, table)
		}
	}
}

// open begins a chain, or a map or set, which is kept as a chain of its
// elements. Of other things nothing is kept.
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

// numbers are protocols as nft writes them where there is no /etc/protocols, as
// in small images.
var numbers = regexp.MustCompile(`l4proto (6|17)( |$)|(^| \. )(6|17) \. `)

// named gives protocols their names.
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

// cutHandle splits off the "# handle 7" that nft -a writes behind things.
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
