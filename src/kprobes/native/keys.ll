; Generated from keys.c by `make runtime`.
; ea23087b2a62744742a0ca6e542e90df34146fa233ef6751b26b8749664c80b0
define dso_local i64 @keys_code(ptr %keys, ptr %rows, i64 %words, i64 %count, ptr %codes) #0 {
entry:
  br label %for.cond
for.cond:
  %rows.addr.0 = phi ptr [ %rows, %entry ], [ %add.ptr52, %for.inc50 ]
  %row.0 = phi i64 [ 0, %entry ], [ %inc51, %for.inc50 ]
  %cmp = icmp ult i64 %row.0, %count
  br i1 %cmp, label %for.body, label %return
for.body:
  %tobool.not = icmp eq i64 %row.0, 0
  br i1 %tobool.not, label %if.end, label %land.lhs.true
land.lhs.true:
  %idx.neg = sub i64 0, %words
  %add.ptr = getelementptr inbounds i64, ptr %rows.addr.0, i64 %idx.neg
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %land.lhs.true ], [ %inc.i, %for.body.i ]
  %difference.i.0 = phi i64 [ 0, %land.lhs.true ], [ %or.i, %for.body.i ]
  %cmp.i = icmp ult i64 %n.i.0, %words
  br i1 %cmp.i, label %for.body.i, label %is_same.exit
for.body.i:
  %arrayidx.i = getelementptr inbounds i64, ptr %rows.addr.0, i64 %n.i.0
  %0 = load i64, ptr %arrayidx.i, align 8
  %arrayidx1.i = getelementptr inbounds i64, ptr %add.ptr, i64 %n.i.0
  %1 = load i64, ptr %arrayidx1.i, align 8
  %xor.i = xor i64 %0, %1
  %or.i = or i64 %difference.i.0, %xor.i
  %inc.i = add i64 %n.i.0, 1
  br label %for.cond.i
is_same.exit:
  %tobool.i.not = icmp eq i64 %difference.i.0, 0
  br i1 %tobool.i.not, label %if.then, label %if.end
if.then:
  %2 = getelementptr i32, ptr %codes, i64 %row.0
  %arrayidx = getelementptr i8, ptr %2, i64 -4
  %3 = load i32, ptr %arrayidx, align 4
  %arrayidx1 = getelementptr inbounds i32, ptr %codes, i64 %row.0
  store i32 %3, ptr %arrayidx1, align 4
  br label %for.inc50
if.end:
  br label %for.cond2
for.cond2:
  %hash.0 = phi i64 [ 0, %if.end ], [ %xor6, %for.inc ]
  %n.0 = phi i64 [ 0, %if.end ], [ %inc, %for.inc ]
  %cmp3 = icmp ult i64 %n.0, %words
  br i1 %cmp3, label %for.inc, label %for.end
for.inc:
  %arrayidx5 = getelementptr inbounds i64, ptr %rows.addr.0, i64 %n.0
  %4 = load i64, ptr %arrayidx5, align 8
  %xor = xor i64 %hash.0, %4
  %mul = mul i64 %xor, -7046029254386353131
  %shr = lshr i64 %mul, 32
  %xor6 = xor i64 %mul, %shr
  %inc = add i64 %n.0, 1
  br label %for.cond2
for.end:
  %mask = getelementptr inbounds nuw i8, ptr %keys, i64 32
  %5 = load i64, ptr %mask, align 8
  %and = and i64 %hash.0, %5
  br label %for.cond7
for.cond7:
  %slot.0 = phi i64 [ %and, %for.end ], [ %and48, %for.inc45 ]
  %slots = getelementptr inbounds nuw i8, ptr %keys, i64 24
  %6 = load ptr, ptr %slots, align 8
  %arrayidx8 = getelementptr inbounds i32, ptr %6, i64 %slot.0
  %7 = load i32, ptr %arrayidx8, align 4
  %cond = icmp eq i32 %7, 0
  br i1 %cond, label %if.then18, label %land.lhs.true10
land.lhs.true10:
  %8 = load ptr, ptr %keys, align 8
  %sub11 = add i32 %7, -1
  %conv = zext i32 %sub11 to i64
  %mul12 = mul i64 %words, %conv
  %add.ptr13 = getelementptr inbounds i64, ptr %8, i64 %mul12
  br label %for.cond.i6
for.cond.i6:
  %n.i5.0 = phi i64 [ 0, %land.lhs.true10 ], [ %inc.i15, %for.body.i10 ]
  %difference.i4.0 = phi i64 [ 0, %land.lhs.true10 ], [ %or.i14, %for.body.i10 ]
  %cmp.i7 = icmp ult i64 %n.i5.0, %words
  br i1 %cmp.i7, label %for.body.i10, label %is_same.exit16
for.body.i10:
  %arrayidx.i11 = getelementptr inbounds i64, ptr %rows.addr.0, i64 %n.i5.0
  %9 = load i64, ptr %arrayidx.i11, align 8
  %arrayidx1.i12 = getelementptr inbounds i64, ptr %add.ptr13, i64 %n.i5.0
  %10 = load i64, ptr %arrayidx1.i12, align 8
  %xor.i13 = xor i64 %9, %10
  %or.i14 = or i64 %difference.i4.0, %xor.i13
  %inc.i15 = add i64 %n.i5.0, 1
  br label %for.cond.i6
is_same.exit16:
  %tobool.i8.not = icmp eq i64 %difference.i4.0, 0
  br i1 %tobool.i8.not, label %if.end16, label %for.inc45
if.end16:
  %tobool17.not = icmp eq i32 %7, 0
  br i1 %tobool17.not, label %if.then18, label %if.end42
if.then18:
  %count19 = getelementptr inbounds nuw i8, ptr %keys, i64 8
  %11 = load i64, ptr %count19, align 8
  %room = getelementptr inbounds nuw i8, ptr %keys, i64 16
  %12 = load i64, ptr %room, align 8
  %cmp20 = icmp eq i64 %11, %12
  br i1 %cmp20, label %return, label %for.cond25
for.cond25:
  %n24.0 = phi i64 [ %inc35, %for.body28 ], [ 0, %if.then18 ]
  %cmp26 = icmp ult i64 %n24.0, %words
  br i1 %cmp26, label %for.body28, label %for.end36
for.body28:
  %arrayidx29 = getelementptr inbounds i64, ptr %rows.addr.0, i64 %n24.0
  %13 = load i64, ptr %arrayidx29, align 8
  %14 = load ptr, ptr %keys, align 8
  %count31 = getelementptr inbounds nuw i8, ptr %keys, i64 8
  %15 = load i64, ptr %count31, align 8
  %mul32 = mul i64 %15, %words
  %16 = getelementptr i64, ptr %14, i64 %mul32
  %arrayidx33 = getelementptr i64, ptr %16, i64 %n24.0
  store i64 %13, ptr %arrayidx33, align 8
  %inc35 = add i64 %n24.0, 1
  br label %for.cond25
for.end36:
  %count37 = getelementptr inbounds nuw i8, ptr %keys, i64 8
  %17 = load i64, ptr %count37, align 8
  %inc38 = add i64 %17, 1
  store i64 %inc38, ptr %count37, align 8
  %conv39 = trunc i64 %inc38 to i32
  %slots40 = getelementptr inbounds nuw i8, ptr %keys, i64 24
  %18 = load ptr, ptr %slots40, align 8
  %arrayidx41 = getelementptr inbounds i32, ptr %18, i64 %slot.0
  store i32 %conv39, ptr %arrayidx41, align 4
  br label %if.end42
if.end42:
  %code.0 = phi i32 [ %7, %if.end16 ], [ %conv39, %for.end36 ]
  %sub43 = add nsw i32 %code.0, -1
  %arrayidx44 = getelementptr inbounds i32, ptr %codes, i64 %row.0
  store i32 %sub43, ptr %arrayidx44, align 4
  br label %for.inc50
for.inc45:
  %add46 = add i64 %slot.0, 1
  %mask47 = getelementptr inbounds nuw i8, ptr %keys, i64 32
  %19 = load i64, ptr %mask47, align 8
  %and48 = and i64 %add46, %19
  br label %for.cond7
for.inc50:
  %inc51 = add i64 %row.0, 1
  %add.ptr52 = getelementptr inbounds i64, ptr %rows.addr.0, i64 %words
  br label %for.cond
return:
  %retval.0 = phi i64 [ %row.0, %if.then18 ], [ %count, %for.cond ]
  ret i64 %retval.0
}
