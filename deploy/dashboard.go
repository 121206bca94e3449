// Package deploy makes the Grafana dashboard from the panels that it lists. Its tests hold
// the dashboard, the alerts and the manifests to what weir does.
package deploy

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
)

// row is a line of the dashboard with the panels below it.
type row struct {
	title  string
	panels []panel
}

// panel is one graph, or one number.
type panel struct {
	kind          string // Grafana's word for it: see [options]
	title         string
	about         string  // what it shows, and what to think of it
	unit          string  // Grafana's word for it
	width, height int     // in the grid, which is 24 wide
	states        []state // of colors, if they mean something
	queries       []query
}

// query is an expression and the name of its series. In it {R stands for the replicas that
// were chosen, and {D for these and the domains.
type query struct{ expr, legend string }

// state is what a value from some bound on means.
type state struct {
	from  float64 // the first state has no bound
	color string
	text  string // instead of the number, if it is not empty
}

const gridWidth = 24

var source = object{"type": "prometheus", "uid": "${datasource}"}

type object = map[string]any

var chosen = strings.NewReplacer("{R", `{job=~"$job", instance=~"$instance"`, "{D", `{job=~"$job", instance=~"$instance", domain=~"$domain"`)

// Dashboard is grafana/weir.json, as Grafana 10 and later import it.
func Dashboard() ([]byte, error) {
	var panels []object
	y := 0
	add := func(o object, x, width, height int) {
		o["id"], o["gridPos"] = len(panels)+1, object{"x": x, "y": y, "w": width, "h": height}
		panels = append(panels, o)
	}
	for _, r := range rows {
		add(object{"type": "row", "title": r.title, "collapsed": false, "panels": []object{}}, 0, gridWidth, 1)
		y++
		x, highest := 0, 0
		for _, p := range r.panels {
			if x+p.width > gridWidth {
				y += highest
				x, highest = 0, 0
			}
			add(p.object(), x, p.width, p.height)
			x += p.width
			highest = max(highest, p.height)
		}
		y += highest
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	err := e.Encode(object{
		"id": nil, "uid": "weir", "title": "weir", "tags": []string{"weir"}, "schemaVersion": 39, "version": 1, "editable": true,
		"description": "Made by TestTheDashboardIsMadeOfItsPanels -rewrite from deploy/panels.go. docs/runbook.md says what to do.",
		"time":        object{"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser",
		"graphTooltip": 1, // one cross hair for all
		"templating":   object{"list": variables()}, "annotations": object{"list": []object{}}, "links": []object{}, "panels": panels,
	})
	return b.Bytes(), err
}

func variables() []object {
	values := func(name, label, query, all string) object {
		return object{
			"name": name, "label": label, "type": "query", "datasource": source, "definition": query,
			"query":      object{"query": query, "refId": "StandardVariableQuery"},
			"includeAll": true, "multi": true, "allValue": all, "refresh": 2 /* with the time range */, "sort": 1,
			"current": object{"selected": true, "text": []string{"All"}, "value": []string{"$__all"}},
			"options": []object{}, "regex": "", "hide": 0, "skipUrlSync": false,
		}
	}
	return []object{
		{
			"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "regex": "", "refresh": 1,
			"includeAll": false, "multi": false, "options": []object{}, "current": object{"text": "default", "value": "default"}, "hide": 0, "skipUrlSync": false,
		},
		values("job", "Job", "label_values(weir_ready, job)", ""),
		values("instance", "Replica", `label_values(weir_ready{job=~"$job"}, instance)`, ""),
		values("domain", "Domain", `label_values({__name__=~"weir_decisions_total|weir_leases_granted_total", job=~"$job"}, domain)`, ".*"),
	}
}

func (p panel) object() object {
	var targets []object
	for i, q := range p.queries {
		t := object{
			"refId": string(rune('A' + i)), "datasource": source, "editorMode": "code",
			"expr": chosen.Replace(q.expr), "legendFormat": q.legend, "range": p.overTime(), "instant": !p.overTime(),
		}
		targets = append(targets, t)
	}
	defaults := object{"unit": p.unit, "color": object{"mode": "palette-classic"}}
	if p.unit == "percentunit" {
		defaults["min"], defaults["max"] = 0, 1
	}
	steps, mapped := []object{{"color": "green", "value": nil}}, object{}
	if len(p.states) > 0 {
		steps = nil
		defaults["color"] = object{"mode": "thresholds"}
	}
	for i, s := range p.states {
		step := object{"color": s.color, "value": s.from}
		if i == 0 {
			step["value"] = nil
		}
		steps = append(steps, step)
		if s.text != "" {
			mapped[strconv.FormatFloat(s.from, 'g', -1, 64)] = object{"text": s.text, "color": s.color, "index": i}
		}
	}
	defaults["thresholds"] = object{"mode": "absolute", "steps": steps}
	mappings := []object{{"type": "special", "options": object{"match": "nan", "result": object{"text": "idle", "index": 9}}}}
	if len(mapped) > 0 {
		mappings = append(mappings, object{"type": "value", "options": mapped})
	}
	defaults["mappings"] = mappings
	if p.kind == "timeseries" {
		defaults["custom"] = object{"drawStyle": "line", "lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": false, "axisSoftMin": 0}
	}
	return object{
		"type": p.kind, "title": p.title, "description": p.about, "datasource": source, "targets": targets,
		"fieldConfig": object{"defaults": defaults, "overrides": []object{}}, "options": options[p.kind],
	}
}

// overTime reports whether a panel shows more than the end of the time range.
func (p panel) overTime() bool { return p.kind == "timeseries" || p.kind == "state-timeline" }

var (
	last    = object{"calcs": []string{"lastNotNull"}, "fields": "", "values": false}
	options = map[string]object{
		"stat":           {"reduceOptions": last, "colorMode": "background", "graphMode": "none", "justifyMode": "center", "textMode": "auto", "wideLayout": true, "orientation": "auto", "showPercentChange": false, "percentChangeColorMode": "standard"},
		"bargauge":       {"reduceOptions": last, "displayMode": "basic", "orientation": "horizontal", "showUnfilled": true, "valueMode": "color", "namePlacement": "auto", "sizing": "auto", "minVizHeight": 16, "minVizWidth": 8, "maxVizHeight": 300, "legend": legend(false)},
		"timeseries":     {"legend": legend(true), "tooltip": object{"mode": "multi", "sort": "desc"}},
		"state-timeline": {"mergeValues": true, "showValue": "auto", "alignValue": "left", "rowHeight": 0.8, "legend": legend(false), "tooltip": object{"mode": "single", "sort": "none"}},
	}
)

func legend(show bool) object {
	return object{"showLegend": show, "displayMode": "list", "placement": "bottom", "calcs": []string{}}
}
